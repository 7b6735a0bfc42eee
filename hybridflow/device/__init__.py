"""The device at hand: the only room that names `torch.cuda`, and what of a model lies on the device."""
