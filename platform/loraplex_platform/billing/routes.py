"""All routes of the domain: prices, credits, invoices."""

from __future__ import annotations

from loraplex_platform.billing import adjustment_routes, invoice_routes, price_routes

routers = (
    price_routes.router,
    adjustment_routes.router,
    invoice_routes.all_router,
    invoice_routes.router,
    invoice_routes.profile_router,
)
