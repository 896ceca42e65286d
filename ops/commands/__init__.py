"""The subcommands of `gateway`. Each module has `add_arguments(parser)` and `run(parsed)`."""
