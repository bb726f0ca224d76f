"""Objects of a run, made from its configuration: data, model, optimizer, loaders, callbacks."""
