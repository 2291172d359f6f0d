"""The MaxText side: sharding, stored chunks, Orbax."""
