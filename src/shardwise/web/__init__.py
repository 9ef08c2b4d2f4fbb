"""The planner as a web page, and the local server of runs."""
