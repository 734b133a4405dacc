"""A conversation over a store of documents: what is asked and kept (session), what is typed, what is shown."""
