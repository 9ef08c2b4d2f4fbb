"""Verbs of the command line: one thin function each."""
