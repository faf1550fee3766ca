"""The people who administer the platform, and their logins."""
