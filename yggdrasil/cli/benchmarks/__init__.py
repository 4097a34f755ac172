"""``yggdrasil bench`` and its subcommands."""
