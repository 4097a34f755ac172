"""Timing of passes, stages, schedules and threads."""
