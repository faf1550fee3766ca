"""The console's start has done what the first page would else wait for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# In a process of its own: this one has long loaded everything.
_FIRST_PAGE = """
import sys
import loraplex_admin.app  # as the server does

before = set(sys.modules)
from streamlit.testing.v1 import AppTest

before |= {name for name in sys.modules if name.startswith("streamlit.testing")}


def page():
    import streamlit as st
    from loraplex_admin.components import charts

    charts.bars([("a", 1.0)], title="t", unit="u", empty="-", key="bars")
    rows = [{"at_s": n, "v": n} for n in range(3)]
    charts.lines(rows, x="at_s", y="v", title="t", unit="u", empty="-", key="lines")
    st.dataframe([{"a": 1, "b": "x"}], key="table")
    st.metric("m", "1")


test = AppTest.from_function(page, default_timeout=60).run()
assert not test.exception, test.exception
ours = ("loraplex_admin", "altair", "pandas", "pyarrow", "narwhals", "jsonschema", "numpy")
print(sorted(m for m in set(sys.modules) - before if m.split(".")[0] in ours))
print("loraplex_admin.views.overview" in before)
"""


def test_the_first_page_of_a_console_loads_no_library(tmp_path: Path) -> None:
    script = tmp_path / "first_page.py"
    script.write_text(_FIRST_PAGE)

    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "True"]
