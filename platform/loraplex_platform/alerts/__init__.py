"""What was told as an alert, kept so that it can be read without a webhook."""
