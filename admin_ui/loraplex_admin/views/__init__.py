"""The pages: each draws what the API says, and is listed in `catalog.py`.

Not called `pages`: a folder of that name beside the script is one that Streamlit runs by itself, past the login.
"""
