"""The front doors: one thin function per verb, and the entry of a rank."""
