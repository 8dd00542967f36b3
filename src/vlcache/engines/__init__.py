"""Engine adapters, one package each. They share the core and nothing else; each is imported only when used."""
