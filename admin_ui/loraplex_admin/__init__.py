"""The admin console: Streamlit pages over the control API."""
