"""The pages in Streamlit's own test driver: opened as somebody, read as words, used by widgets' keys."""

from __future__ import annotations

import re
from typing import Any

from loraplex_admin.access import Access
from loraplex_admin.api import Api
from streamlit.testing.v1 import AppTest

_KINDS = ("title", "subheader", "markdown", "caption", "text", "code", "success", "info")
_KINDS += ("warning", "error", "metric", "expander", "toast")
_WIDGETS = (
    "button",
    "text_input",
    "text_area",
    "selectbox",
    "multiselect",
    "toggle",
    "number_input",
)


def _script(path, api, access):  # AppTest runs its text alone, where no name of this module exists
    from loraplex_admin.api import ApiError, ApiUnreachableError
    from loraplex_admin.catalog import PAGES
    from loraplex_admin.choices import show_refusal, wait_for_the_api

    page = next(page for page in PAGES if page.path == path)
    try:
        page.render(api, access)
    except ApiUnreachableError:
        wait_for_the_api(api)
    except ApiError as error:
        show_refusal(error)


def access_of(api: Api) -> Access:
    """What whoever `api` is logged in as may do."""
    session = api.session()
    assert session is not None
    return Access.of(session)


def open_page(
    path: str,
    api: Api,
    tenant: dict[str, Any] | None = None,
    *,
    access: Access | None = None,
    **in_address: str,
) -> AppTest:
    """Run a page as whoever `api` is logged in as, with this tenant chosen and this in the address."""
    test = AppTest.from_function(
        _script,
        default_timeout=60,
        kwargs={"path": path, "api": api, "access": access or access_of(api)},
    )
    if tenant is not None:
        test.query_params["tenant"] = tenant["slug"]
    for name, value in in_address.items():
        test.query_params[name] = value
    return checked(test.run())


def checked(test: AppTest) -> AppTest:
    """After a run: nothing crashed."""
    assert not test.exception, test.exception
    return test


def press(test: AppTest, key: str) -> AppTest:
    """Press a button."""
    return checked(test.button(key=key).click().run())


def fill(test: AppTest, **values: Any) -> AppTest:
    """Write into text fields, by their keys."""
    for key, value in values.items():
        test.text_input(key=key).set_value(value)
    return test


def confirm(test: AppTest, key: str, name: str) -> AppTest:
    """Type the name and press: what `components.confirm` asks for."""
    test.text_input(key=f"{key}_typed").set_value(name)
    return press(test, f"{key}_go")


def words(test: AppTest) -> str:
    """Everything that is written on the page, as it was given to Streamlit."""
    found = []
    for kind in _KINDS:
        for element in getattr(test, kind):
            found += [str(getattr(element, name, "")) for name in ("label", "value")]
    return "\n".join(found)


def marked(test: AppTest) -> str:
    """Everything that Streamlit reads as Markdown."""
    kinds = (
        "title",
        "subheader",
        "markdown",
        "caption",
        "success",
        "info",
        "warning",
        "error",
        "toast",
    )
    found = [str(element.value) for kind in kinds for element in getattr(test, kind)]
    labels = [
        str(one.label) for kind in ("expander", "metric", *_WIDGETS) for one in getattr(test, kind)
    ]
    return "\n".join(found + labels)


def table(test: AppTest, name: str) -> Any:
    """The list of this name, as a data frame; None while it is empty."""
    for element in test.dataframe:
        if str(element.key).startswith(f"{name}_table"):
            return element.value
    return None


def records(test: AppTest, column: str) -> list[dict[str, Any]]:
    """The rows of the first table that has such a column."""
    for element in test.dataframe:
        if column in element.value.columns:
            return list(element.value.to_dict("records"))
    for element in test.table:  # of Markdown, in which all that could mean something is escaped
        if column in element.value.columns:
            rows = element.value.to_dict("records")
            return [
                {name: re.sub(r"\\(.)", r"\1", str(cell)) for name, cell in row.items()}
                for row in rows
            ]
    raise AssertionError(f"no table has a column {column!r}")


def choose(test: AppTest, name: str, row: int) -> AppTest:
    """Tick a row of a list."""
    element = next(one for one in test.dataframe if str(one.key).startswith(f"{name}_table"))
    test.session_state[element.key] = {"selection": {"rows": [row], "columns": [], "cells": []}}
    return checked(test.run())


def keys_of(test: AppTest) -> set[str]:
    """Of all widgets that the page offers."""
    kinds = (*_WIDGETS, "file_uploader")
    return {str(one.key) for kind in kinds for one in getattr(test, kind)}
