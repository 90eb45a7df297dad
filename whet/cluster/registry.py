"""Built-in clusters by the name that recipes use."""

CLUSTERS = {
    "local": "whet.cluster.config:LocalClusterConfig",
    "processes": "whet.cluster.config:ProcessClusterConfig",
    "ray": "whet.cluster.config:RayClusterConfig",
}
