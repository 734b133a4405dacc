"""The web page of ``entroprefill serve``: questions over a store of documents, one machine, few people."""
