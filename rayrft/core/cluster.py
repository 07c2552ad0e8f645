"""Connection to a Ray cluster, with its authentication token."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import socket
import stat
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayrft.errors import ClusterError, first_line
from rayrft.registry import Lazy
from rayrft.runtime import ray_api
from rayrft.runtime.handle import NAMESPACE
from rayrft.runtime.ray_api import ray

if TYPE_CHECKING:
    import grpc
else:
    grpc = Lazy("grpc")

_CONNECT_TIMEOUT_S = 5.0
"""Time for a cluster to answer; Ray itself tries for two minutes."""
_BUSY_S = 30.0
"""Time for a cluster to answer that has just answered."""
_starting = threading.local()
"""``own_group`` is set in a thread that starts a Ray, whose processes get a group of their own: a signal to this one's
group, as a terminal that closes sends it, must not end the Ray with which a run saves and ends."""
os.register_at_fork(after_in_child=lambda: os.setpgrp() if getattr(_starting, "own_group", False) else None)


def connect(*, start: bool = True) -> None:
    """Connect to the cluster at RAY_ADDRESS or, if unset, to one on this machine; else start one for this process.

    On this machine the cluster of the latest `ray start` is used; with ``start=False`` also another, if it is the only
    one. A token is sent only to a cluster that requires one, whatever lies in the home folder.

    Raises ClusterError, within seconds, if nothing answers at RAY_ADDRESS, if Ray does not start, or if cluster and
    process do not agree on a token. Raises it also if ``start=False`` and there is no cluster or more than one.
    """
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "auto", "local"):
        address = "" if address == "local" else _on_this_machine(any_one=not start)
    if address:
        mode = _mode_of(address)
        if mode == "disabled" and start:
            _say(
                f"the Ray at {address} works without authentication: anyone who can reach it can run code on it. For "
                "a token, stop it, run `ray get-auth-token --generate`, and start it again"
            )
        _check_raylet(address, mode)
        _init(address, mode)
    elif not start:
        raise ClusterError("no Ray cluster runs on this machine", "set RAY_ADDRESS to the address of the run's cluster")
    else:  # on free ports; it ends with this process
        ensure_token()
        context = _init("local", os.environ.get("RAY_AUTH_MODE", "token"))
        gcs, dashboard = context.address_info["gcs_address"], context.dashboard_url
        _say(f"started a Ray for this process: RAY_ADDRESS={gcs} for other terminals, dashboard {dashboard}")


def _init(address: str, mode: str) -> Any:
    """Call `ray.init` in this mode, and restore mode and SIGTERM's handler. Raises ClusterError for its errors."""
    handler, asked = signal.getsignal(signal.SIGTERM), os.environ.get("RAY_AUTH_MODE")
    # Ray passes this to a shell unquoted, for workers with a runtime environment, such as Ray Train's.
    python = shlex.quote(sys.executable)
    environment = None if python == sys.executable else {"py_executable": python}
    os.environ["RAY_AUTH_MODE"] = mode
    ray_api.Config.initialize("")
    _starting.own_group = True
    try:
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        return ray.init(address=address, namespace=NAMESPACE, runtime_env=environment, **quiet)
    except Exception as error:  # Ray raises many types, Exception itself among them
        reason = first_line(error)
        problem = f"Ray {'did not start' if address == 'local' else 'could not be joined'}: {reason.rstrip('.')}"
        field, value = "RAY_ADDRESS", address
        remedy = "see the files in ray/session_latest/logs of the temporary folder; if the machine is busy, try again"
        if "AF_UNIX" in reason:
            field, value, remedy = "TMPDIR", tempfile.gettempdir(), "set it to a shorter path, such as /tmp"
        raise ClusterError(problem, remedy, field=field, value=value) from None
    finally:
        _starting.own_group = False
        del os.environ["RAY_AUTH_MODE"]
        if asked is not None:
            os.environ["RAY_AUTH_MODE"] = asked
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)  # Ray's own dumps its C++ stack


def _mode_of(address: str) -> str:
    """Return the authentication mode of the cluster with its head at ``host:port``: ``token`` or ``disabled``. Raises
    ClusterError, within seconds, unless the cluster accepts this process in that mode."""
    asked = os.environ.get("RAY_AUTH_MODE", "").lower()
    problem = "no Ray cluster answers there"
    remedy = "set it to host:port of a running Ray cluster, or unset it to use one on this machine"
    if "://" in address:
        problem, remedy = "a run starts on the cluster itself", "set it to host:port of the head, or: ray job submit"
    elif (answer := _answer(address, "")) == grpc.StatusCode.OK:
        if asked != "token":
            return "disabled"
        problem, remedy = "the cluster works without the token that RAY_AUTH_MODE requires", "unset RAY_AUTH_MODE"
    elif answer == grpc.StatusCode.UNAUTHENTICATED:
        token = "" if asked == "disabled" else _find_token()
        if token and (answer := _answer(address, token, _BUSY_S)) == grpc.StatusCode.OK:
            return "token"
        problem = "the cluster rejects our token" if token else "the cluster requires a token, and we send none"
        remedy = "put its token into RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token, and leave RAY_AUTH_MODE unset"
        if answer != grpc.StatusCode.UNAUTHENTICATED:
            raise _busy(address, answer)
    raise ClusterError(problem, remedy, field="RAY_ADDRESS", value=address)


def _check_raylet(address: str, mode: str) -> None:
    """Raise ClusterError unless this machine is a node of the cluster: without a raylet, Ray aborts the process."""
    request, token = ray_api.GetAllNodeInfoRequest(), _find_token() if mode == "token" else ""
    try:
        nodes = _ask(address, token, "GetAllNodeInfo", request, _BUSY_S).node_info_list
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.UNIMPLEMENTED:
            return
        raise _busy(address, error.code()) from None
    if not any(_listens(node.raylet_socket_name) for node in nodes):
        problem = "this machine is not a node of the cluster"
        head = address.rpartition(":")[0]
        remedy = f"run it on the cluster: RAY_ADDRESS=http://{head}:8265 ray job submit -- rayrft run my.yaml"
        raise ClusterError(problem, remedy, field="RAY_ADDRESS", value=address)


def _busy(address: str, answer: grpc.StatusCode) -> ClusterError:
    problem = f"the cluster does not answer in time ({answer.name})"
    return ClusterError(problem, "try again: it may be busy", field="RAY_ADDRESS", value=address)


def _listens(path: str) -> bool:
    """Return whether a process listens on the Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
        probe.connect(path)
        return True
    return False


def _answer(address: str, token: str, timeout_s: float = _CONNECT_TIMEOUT_S) -> grpc.StatusCode:
    """Ask the head at ``address`` whether it is alive, and return the status of the call."""
    try:
        _ask(address, token, "CheckAlive", ray_api.CheckAliveRequest(), timeout_s)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def _ask(address: str, token: str, method: str, request: Any, timeout_s: float = _CONNECT_TIMEOUT_S) -> Any:
    """Call a method of the head: with a token, or "" for none, whatever this process' mode is. Raises grpc.RpcError."""
    options = [("grpc.enable_http_proxy", 0)]
    channel = grpc.insecure_channel(address, options)
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        chain, key, authority = ray_api.load_certs_from_env()
        channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(authority, key, chain), options)
    header = [("authorization", f"Bearer {token}")] if token else None
    with channel:
        call = getattr(ray_api.NodeInfoGcsServiceStub(channel), method)
        return call(request, timeout=timeout_s, metadata=header)


def _on_this_machine(*, any_one: bool) -> str:
    """Return the address of the latest `ray start`, or (``any_one``) of the only cluster that accepts us; else ""."""

    def accepts(address: str) -> bool:
        try:
            return bool(_mode_of(address))
        except ClusterError:
            return False

    if (latest := ray_api.read_ray_address()) and accepts(latest):
        return latest
    found = list(filter(accepts, sorted(ray_api.find_gcs_addresses()))) if any_one else []
    if len(found) > 1:
        raise ClusterError("several Ray clusters run on this machine", "set RAY_ADDRESS to one", value=found)
    return found[0] if found else ""


def ensure_token() -> None:
    """Create Ray's authentication token if authentication is on and there is none, and print its path.

    Ray reads RAY_AUTH_TOKEN, else the file RAY_AUTH_TOKEN_PATH, else ``~/.ray/auth_token``. If the home folder is not
    writable, the token is stored in a temporary folder of this user, and RAY_AUTH_TOKEN_PATH is set to it for this
    process and its children. Raises ClusterError if it cannot be written anywhere.
    """
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token" or _find_token():
        return
    for path in _token_files():
        with contextlib.suppress(OSError):
            _write_token(path)
            _say(f"created Ray's authentication token: {path}")
            _find_token()
            return
    remedy, files = "set it to a writable file, or set RAY_AUTH_MODE=disabled", list(map(str, _token_files()))
    raise ClusterError("Ray's token cannot be written", remedy, field="RAY_AUTH_TOKEN_PATH", value=files)


def use_token() -> None:
    """Send our token, if there is one, to a cluster that requires one; Ray does not do so when given an address."""
    if "RAY_AUTH_MODE" not in os.environ and _find_token():
        ray_api._enable_token_auth()


def _find_token() -> str:
    """Return the token, "" if there is none; set RAY_AUTH_TOKEN_PATH to one that Ray would not find itself."""
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token
    for path in _token_files():
        with contextlib.suppress(OSError):
            if token := path.read_text().strip():
                if path != Path(os.path.expanduser("~/.ray/auth_token")):
                    os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)
                return token
    return ""


def _token_files() -> list[Path]:
    if named := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return [Path(named)]
    home = Path(os.path.expanduser("~/.ray/auth_token"))
    own = Path(tempfile.gettempdir(), f"rayrft-{os.getuid()}")
    files = [home] if home.is_absolute() else []
    # The temporary folder is shared: use a subfolder only if no other user can read it.
    with contextlib.suppress(FileNotFoundError):
        found = own.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            return files
    return [*files, own / "auth_token"]


def _write_token(path: Path) -> None:
    """Write a token atomically, readable by this user only; of concurrent writers the first one wins."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.exists():  # an empty file: `_find_token` skipped it
        path.unlink()
    with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:
        file.write(secrets.token_hex(32))
        file.flush()
        with contextlib.suppress(FileExistsError):
            os.link(file.name, path)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
