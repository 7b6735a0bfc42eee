"""Device abstraction: the only package that uses `torch.cuda`, and the one that moves model parts on and off the
device."""
