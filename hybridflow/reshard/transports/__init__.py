"""Ways to bring the messages of a slice plan from trainer ranks to the ranks of one engine."""
