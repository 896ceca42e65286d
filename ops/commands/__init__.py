"""The subcommands of `gateway`: one module each, with `add_arguments(parser)` and `run(parsed)`."""
