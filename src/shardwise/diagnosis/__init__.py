"""What a run loses time to, with evidence, cost and the fix."""
