"""Measures the time of passes, stages, schedules and thread counts."""
