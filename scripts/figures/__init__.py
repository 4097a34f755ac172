"""The paper's figures, measured on this machine: one CSV and one plot per figure."""
