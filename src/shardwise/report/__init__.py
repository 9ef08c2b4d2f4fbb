"""Tables for people, one JSON document for programs."""
