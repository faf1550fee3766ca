"""One module a page, each with `render(api, user)`; `app.py` alone builds the navigation."""
