"""The target model: its steps, verification and commit, with acceptance on the device or on the host."""
