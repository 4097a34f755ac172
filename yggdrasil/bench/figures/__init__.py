"""The paper's evaluation, measured on this machine: one CSV and one plot a figure."""
