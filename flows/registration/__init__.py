"""What `sparkrail register` keeps on a Prefect server, object by object."""
