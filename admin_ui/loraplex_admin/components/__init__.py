"""What pages are made of: lists, forms, questions before something is lost, charts, live figures.

One place for each, so that all pages page, search, refuse and forget in the same way.
"""
