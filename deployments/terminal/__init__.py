"""What the command line prints and asks; imported by `deployments.cli` command by command."""
