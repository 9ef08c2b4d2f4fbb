"""Numbers that are not finite: where they were made, found by replaying the step that showed them."""
