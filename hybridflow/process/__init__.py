"""Process management: startup and shutdown, rendezvous, and the exchange of short texts between
ranks without the training collectives.
"""
