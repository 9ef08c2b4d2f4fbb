"""The planner as a web page: its answers, the static site around them, and the local server."""
