"""The docker engine of a node, spoken to by docker-py through the node's SSH connection."""

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import docker
import requests
import urllib3
from docker.errors import APIError, DockerException
from docker.transport.sshconn import RecentlyUsedContainer, SSHHTTPAdapter
from tenacity import (
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    stop_after_delay,
    stop_when_event_set,
    wait_fixed,
)

from blocks import Cluster, Node
from tasks.errors import CommandFailed, EngineSilent, NodeUnreachable, SparkrailError
from tasks.remote import STOP, Remote, connect

API_TIMEOUT = 60
DIAL = ("docker", "system", "dial-stdio")
RESTART_SECONDS = 60.0
WATCH = 10.0  # So long the engine may take before we ask whether its node is still there.
_clients: dict[int, tuple[Remote, docker.DockerClient]] = {}
_lock = threading.Lock()


class _Sessions:
    """What docker-py takes for an SSH transport; its sessions begin behind what a login prints."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    def open_session(self) -> Any:
        stream: Any = self._remote.start(DIAL, shown=" ".join(DIAL))
        stream.exec_command = lambda _command: None  # It runs.
        return stream


class _OverConnection(SSHHTTPAdapter):
    """docker-py's own SSH adapter, on a connection that is already open."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self.ssh_client: Any = SimpleNamespace(
            get_transport=lambda: _Sessions(remote), close=lambda: None
        )
        self.ssh_host = remote.node.address
        self.timeout = API_TIMEOUT
        self.max_pool_size = 2
        self.pools: Any = RecentlyUsedContainer(2, dispose_func=lambda pool: pool.close())
        # SSHHTTPAdapter's own __init__ would open a connection of its own, without a gateway.
        super(SSHHTTPAdapter, self).__init__()

    def send(self, *arguments: Any, **options: Any) -> Any:
        watch = _Watch(self._remote)
        try:
            return super().send(*arguments, **options)
        except Exception as error:
            if watch.lost:
                raise watch.lost from error
            raise
        finally:
            watch.over.set()


class _Watch:
    """While the engine is asked something: a node that has fallen silent ends the wait.

    docker-py would wait a minute and blame the engine, or without end where the node never answers
    that it runs `docker system dial-stdio`.
    """

    def __init__(self, remote: Remote) -> None:
        self.over = threading.Event()
        self.lost: SparkrailError | None = None
        self._remote = remote
        threading.Thread(target=self._look, name="engine watch", daemon=True).start()

    def _look(self) -> None:
        while not self.over.wait(WATCH):
            try:
                self._remote.run(("true",), timeout=API_TIMEOUT)
            except NodeUnreachable as error:
                self.lost = error
                self._remote.close()
                return
            except SparkrailError:
                return


@contextlib.contextmanager
def engine(cluster: Cluster, node: Node) -> Iterator[docker.DockerClient]:
    """A docker client for a node; every failure to reach or use the engine names the node."""
    remote = connect(cluster, node)
    try:
        yield _client(remote)
    except (requests.ConnectionError, requests.Timeout, urllib3.exceptions.HTTPError) as error:
        remote.transport  # noqa: B018 - raises NodeUnreachable when the connection itself is gone
        raise no_engine(node, str(error)) from error
    except APIError as error:
        raise CommandFailed(f"docker: {error.explanation or error}", node=node.name) from error
    except DockerException as error:
        raise no_engine(node, str(error)) from error
    except EOFError as error:
        raise NodeUnreachable("connection lost", node=node.name) from error


def await_engine(cluster: Cluster, node: Node, patience: float = RESTART_SECONDS) -> None:
    """Return once docker answers on the node: a restart of it takes some seconds."""

    def ping() -> None:
        with engine(cluster, node) as client:
            client.ping()

    Retrying(
        retry=retry_if_exception_type(EngineSilent),
        stop=stop_after_delay(patience) | stop_when_event_set(STOP),
        wait=wait_fixed(1),
        sleep=sleep_using_event(STOP),
        reraise=True,
    )(ping)


def no_engine(node: Node, said: str) -> EngineSilent:
    """The error for a node whose docker does not answer."""
    return EngineSilent(
        "the docker engine does not answer",
        node=node.name,
        details=said,
        remedy=f"Is dockerd running, and may {node.user} use it (group docker)? "
        f"Try `docker info` on {node.name}.",
    )


def _client(remote: Remote) -> docker.DockerClient:
    with _lock:
        held = _clients.get(id(remote))
        if held is not None:
            return held[1]
    client = docker.DockerClient(base_url="tcp://node:2375", version="1.41", timeout=API_TIMEOUT)
    api: Any = client.api
    api.mount("http+docker://", _OverConnection(remote))
    api.base_url = "http+docker://ssh"
    # Negotiated, never pinned: docker 29 refuses clients below 1.44, older engines those above.
    api._version = api._retrieve_server_version()
    with _lock:
        # The remote is kept beside its client so that its id() is not used again.
        _clients[id(remote)] = (remote, client)
    return client
