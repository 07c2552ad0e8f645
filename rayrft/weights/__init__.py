"""Weight transfer between trainer and engines: buckets, digest, process group. Both sides import it."""
