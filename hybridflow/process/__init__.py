"""Process management: startup and shutdown, rendezvous, and exchange of text outside the training
collectives."""
