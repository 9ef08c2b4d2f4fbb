"""The decision: strategy grammar, parallel dims, the plan and its fingerprint."""
