"""What the first page would else wait for: the pages' modules, and what charts and tables load at their first use.

Several seconds of imports on two cores. They belong to the server's start, before it says that it is healthy.
"""

from __future__ import annotations

import altair as alt
import pandas as pd
import streamlit as st
from streamlit.dataframe_util import convert_pandas_df_to_arrow_bytes

from loraplex_admin import catalog  # noqa: F401 - all pages' modules


def warm_up() -> None:
    """Make a chart and a table of each kind of value that pages show, for nobody."""
    frame = pd.DataFrame(
        {"name": ["a"], "value": [1.0], "count": [1], "at": pd.to_datetime([0], utc=True)}
    )
    convert_pandas_df_to_arrow_bytes(frame)
    # Its schema is read and its converters are found with the first chart.
    alt.Chart(frame).mark_bar().encode(
        x=alt.X("value:Q", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format="~s")),
        y=alt.Y("name:N", sort=None),
        tooltip=[alt.Tooltip("at:T"), alt.Tooltip("count:Q")],
    ).to_dict()
    # Streamlit loads an element's module when the element is first named.
    for element in ("altair_chart", "dataframe", "data_editor", "file_uploader", "chat_input"):
        getattr(st, element)
