"""Checks of the model: its files, code of its own, and whether its sizes can be split."""

from tasks.checks.site import Finding, Site, blocked, gib, ready
from tasks.manifests import differing, listed, problems
from tasks.weights import brings_tokenizer

SHOWN = 3


def weights(site: Site) -> Finding:
    """Whole on the head, by their own headers and index; on a worker, somewhere to be written."""
    return _on_the_head(site) if site.is_head else _on_a_worker(site)


def _on_the_head(site: Site) -> Finding:
    found, path = site.here.weights, site.cluster.model.path
    wrong = problems(found, own_tokenizer=brings_tokenizer(site.cluster))
    if not wrong:
        return ready(f"{len(found.files)} files, {gib(found.size)}")
    more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    if found.folder:
        wrong = [f"it {found.folder}"]
    return blocked(
        f"the model in {path} is not complete: {'; '.join(wrong[:SHOWN])}{more}",
        f"Finish or repeat the download on {site.node.name}, for example: "
        f"hf download ORG/NAME --local-dir {path}",
    )


def _on_a_worker(site: Site) -> Finding:
    have, path = site.here.weights, site.cluster.model.path
    want = site.wanted_weights
    lacking = differing(want, have)
    if not lacking:
        return ready(f"{len(have.files)} files, {gib(have.size)}")
    disk = site.here.disk_of(path)
    if disk and not disk.writable:
        return blocked(
            f"{site.here.user} may not write to {disk.nearest}, but {path} must be made or "
            "completed",
            f"On {site.node.name}: sudo install -d -o {site.here.user} {path}",
        )
    size = sum(want.files[name].size for name in lacking)
    return ready(
        f"{len(lacking)} of {len(want.files)} files will be copied from "
        f"{site.cluster.head.name} ({gib(size)}): {listed(lacking, SHOWN)}"
    )


def own_code(site: Site) -> Finding | None:
    """Code that comes with the weights runs only where the spec says so."""
    if not site.is_head or not site.here.model.own_code:
        return None
    files = ", ".join(site.here.model.own_code)
    if site.cluster.model.trust_remote_code:
        return ready(f"trusted: {files} names code in the model's folder")
    return blocked(
        f"{files} names code of the model's own (auto_map), which the engine may not run",
        "If you trust that code, set model.trust_remote_code: true. If the engine knows "
        f"{site.here.model.config.get('model_type', 'the model')} without it, take auto_map out.",
    )


def split(site: Site) -> Finding | None:
    """Ranks share the attention heads evenly."""
    heads = site.here.model.config.get("num_attention_heads")
    if not site.is_head or not isinstance(heads, int):
        return None
    ranks = site.cluster.serve.tensor_parallel
    if heads % ranks == 0:
        return ready(f"{heads} attention heads over {ranks} ranks")
    return blocked(
        f"{heads} attention heads cannot be shared by {ranks} tensor-parallel ranks",
        f"Take a serve.tensor_parallel that divides {heads}, and let "
        "serve.pipeline_parallel have the rest.",
    )
