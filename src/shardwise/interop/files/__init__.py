"""Configuration files of other trainers as a plan and a config: one table of keys for each, one engine for all."""
