"""Prices, and money as exact integers."""
