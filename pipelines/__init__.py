"""What a person launches: argument parsing and wiring only. Runs from the repository, not in the wheel."""
