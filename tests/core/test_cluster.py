"""Which cluster a process works on, what it says where there is none, and the token that Ray asks for."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import grpc
import psutil
import pytest
import ray
from ray import _raylet
from ray._private import services, utils
from ray._private.authentication import authentication_token_setup
from ray._raylet import AuthenticationTokenLoader
from ray.core.generated import gcs_service_pb2_grpc as grpc_service
from ray.core.generated.gcs_pb2 import GcsNodeInfo
from ray.core.generated.gcs_service_pb2 import CheckAliveReply, GetAllNodeInfoReply

from rayrft.core.cluster import connect, ensure_token, use_token
from rayrft.errors import ClusterError
from tests.errors import about

Head = Callable[..., str]
CONNECT = "from rayrft.core.cluster import connect; connect()"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine on which Ray never ran: an empty home, empty temporary files, no variable set."""
    connected = ray.is_initialized()  # then this process has its token by heart
    # What this process has read of the variables stays, for the Ray that other tests have joined.
    monkeypatch.setattr(_raylet, "Config", SimpleNamespace(initialize=lambda _: None))
    monkeypatch.setattr(authentication_token_setup, "Config", _raylet.Config)
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # so that it is put back, whoever sets it
        monkeypatch.delenv(name)
    (tmp_path / "home").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    yield tmp_path / "home"
    if not connected:
        AuthenticationTokenLoader.instance().reset_cache()


@pytest.fixture
def closed() -> Iterator[str]:
    """An address at which nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def head() -> Iterator[Head]:
    """Starts a server that answers like a head node: without authentication, or only to its token."""
    servers = []

    def start(
        *, token: str | None = None, seen: list[str | None] | None = None, sockets: Sequence[Path] = (), busy: str = ""
    ) -> str:
        class Gcs(grpc_service.NodeInfoGcsServiceServicer):
            def CheckAlive(self, request: Any, context: Any) -> Any:
                sent = dict(context.invocation_metadata()).get("authorization")
                if seen is not None:
                    seen.append(sent)
                if token is not None and sent != f"Bearer {token}":
                    context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
                if busy == "CheckAlive":
                    context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "too many calls")
                return CheckAliveReply()

            def GetAllNodeInfo(self, request: Any, context: Any) -> Any:
                if busy == "GetAllNodeInfo" or context.time_remaining() < 20:  # the answer may take as long
                    context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "too many calls")
                if not sockets:
                    context.abort(grpc.StatusCode.UNIMPLEMENTED, "not asked")
                return GetAllNodeInfoReply(
                    node_info_list=[GcsNodeInfo(raylet_socket_name=str(each)) for each in sockets]
                )

        server = grpc.server(ThreadPoolExecutor(1))
        grpc_service.add_NodeInfoGcsServiceServicer_to_server(Gcs(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.stop(None)


class Joined(list[str]):
    """Addresses that Ray was asked to join, and in which modes and environments."""

    def __init__(self) -> None:
        self.modes, self.environments = list[str](), list[Any]()

    def init(self, address: str, *, runtime_env: Any, **_: Any) -> Any:
        self.append(address)
        self.modes.append(os.environ["RAY_AUTH_MODE"])
        self.environments.append(runtime_env)
        signal.signal(signal.SIGTERM, lambda *_: None)
        return SimpleNamespace(address_info={"gcs_address": "127.0.0.1:1"}, dashboard_url="127.0.0.1:2")


@pytest.fixture
def joined(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Joined]:
    """No other Ray is on this machine unless a test says so. A signal means after connecting what it meant before."""
    joined, handler = Joined(), signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "token")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", joined.init)
    on_this_machine(monkeypatch)
    yield joined
    after = signal.signal(signal.SIGTERM, handler)
    assert after == handler


def on_this_machine(monkeypatch: pytest.MonkeyPatch, *running: str, latest: str | None = None) -> None:
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: set(running))
    monkeypatch.setattr(utils, "read_ray_address", lambda: latest)


def test_an_address_that_leads_nowhere_is_refused(joined: Joined, closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for address in (closed, f"http://{closed}", f"ray://{closed}"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ClusterError) as caught:
            connect()
        assert (caught.value.field, caught.value.value) == ("RAY_ADDRESS", address)
    assert joined == []


@pytest.mark.parametrize("here", [False, True])
def test_a_machine_that_is_no_node_of_the_cluster_is_refused_with_the_command_that_submits(
    joined: Joined, head: Head, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, here: bool
) -> None:
    left, live = tmp_path / "left", tmp_path / "live"
    with socket.socket(socket.AF_UNIX) as stale, socket.socket(socket.AF_UNIX) as raylet:
        stale.bind(str(left))  # of a raylet that was killed: nothing listens
        raylet.bind(str(live))
        raylet.listen()
        address = head(sockets=[tmp_path / "of another machine", left, *[live] * here])
        monkeypatch.setenv("RAY_ADDRESS", address)
        if here:
            connect()
        else:
            with pytest.raises(
                ClusterError, match=r"RAY_ADDRESS: this machine is not a node.*ray job submit -- rayrft run"
            ):
                connect()
    assert joined == [address] * here


@pytest.mark.parametrize("required", [None, "secret"])
@pytest.mark.parametrize("found", [None, "secret", "of another cluster"])
@pytest.mark.parametrize("asked", [None, "token", "disabled"])
def test_authentication_follows_the_cluster_that_is_joined(
    joined: Joined,
    home: Path,
    head: Head,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    required: str | None,
    found: str | None,
    asked: str | None,
) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    if found is not None:
        (home / ".ray").mkdir()
        (home / ".ray/auth_token").write_text(found)
    if asked is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", asked)
    seen: list[str | None] = []
    address = head(token=required, seen=seen)
    monkeypatch.setenv("RAY_ADDRESS", address)
    on_this_machine(monkeypatch, "127.0.0.1:1", latest="127.0.0.1:1")
    works = asked != "disabled" and found == required if required else asked != "token"
    if works:
        connect()
        assert ("works without authentication" in capfd.readouterr().err) is (required is None)
    else:
        with pytest.raises(ClusterError, check=about("RAY_ADDRESS")):
            connect()
    assert joined == [address] * works and joined.modes == ["token" if required else "disabled"] * works
    assert os.environ.get("RAY_AUTH_MODE") == asked, "of no meaning for the next cluster"
    if required is None or asked == "disabled":
        assert seen == [None], "a token goes to no cluster that works without one"


@pytest.mark.parametrize("question", ["CheckAlive", "GetAllNodeInfo"])
def test_a_cluster_that_is_too_busy_to_answer_is_not_joined_and_not_said_to_reject_the_token(
    joined: Joined, head: Head, monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.setenv("RAY_ADDRESS", head(token="secret", busy=question))
    with pytest.raises(ClusterError, match=r"does not answer in time \(DEADLINE_EXCEEDED\).*[Tt]ry again"):
        connect()
    assert joined == []


@pytest.mark.parametrize(
    ("error", "field"),
    [
        (OSError("validate_socket_filename failed: AF_UNIX path length cannot exceed 107 bytes: /tmp/x"), "TMPDIR"),
        (Exception("The current node timed out during startup. This could happen because of load."), "RAY_ADDRESS"),
        (RuntimeError("\n Failed to start GCS.\nTraceback (most recent call last):\n ..."), "RAY_ADDRESS"),
        (ConnectionError(), "RAY_ADDRESS"),
    ],
)
def test_a_ray_that_does_not_start_is_one_line_with_field_and_remedy(
    joined: Joined, monkeypatch: pytest.MonkeyPatch, error: Exception, field: str
) -> None:
    monkeypatch.setattr(ray, "init", mock.Mock(side_effect=error))
    with pytest.raises(ClusterError, check=about(field)) as caught:
        connect()
    assert "\n" not in str(caught.value) and caught.value.remedy
    assert caught.value.__suppress_context__


def test_the_latest_cluster_is_joined(joined: Joined, head: Head, closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    latest = head()
    on_this_machine(monkeypatch, head(), latest, latest=latest)
    connect()
    assert joined == [latest]
    for gone in (closed, head(token="of others")):  # its address is still written down, or it is somebody else's
        on_this_machine(monkeypatch, head(), latest=gone)
        connect()
    assert joined[1:] == ["local", "local"]


def test_a_python_whose_path_has_a_space_is_found(joined: Joined, head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", head())
    for path in ("/opt/rayrft/python", "/home/my checkout/python"):
        monkeypatch.setattr(sys, "executable", path)
        connect()
    assert joined.environments == [None, {"py_executable": "'/home/my checkout/python'"}]


def test_a_ray_of_its_own_ends_with_the_process_and_not_with_a_signal_to_its_group(
    ray_cluster: Any, home: Path
) -> None:
    handled = "import ray, signal, sys; signal.signal(signal.SIGHUP, lambda *_: None)"
    asked = "sys.stdin.readline(); print(ray.get(ray.remote(lambda: 7).remote()), flush=True)"
    code = f"{handled}; {CONNECT}; print('ready', flush=True); {asked}; sys.stdin.read()"
    mark = uuid.uuid4().hex
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    env = {**os.environ, "RAY_ADDRESS": "local", "RAYRFT_TEST_MARK": mark}
    process = subprocess.Popen([sys.executable, "-c", code], env=env, text=True, start_new_session=True, **pipes)
    assert process.stdin is not None and process.stdout is not None
    line = process.stdout.readline()
    os.killpg(process.pid, signal.SIGHUP)  # as a terminal that closes
    process.stdin.write("\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    processes = psutil.process_iter(["environ"])
    started = [each for each in processes if (each.info["environ"] or {}).get("RAYRFT_TEST_MARK") == mark]
    _, errors = process.communicate(timeout=60)
    assert (line, answer) == ("ready\n", "7\n"), errors
    assert str(home / ".ray/auth_token") in errors and "RAY_ADDRESS=" in errors
    assert len(started) > 3, "the raylet, among others"
    _, alive = psutil.wait_procs(started, timeout=60)
    assert not alive
    assert ray.cluster_resources(), "the other one goes on"


@pytest.mark.slow
def test_a_cluster_without_a_token_is_joined_by_a_user_who_has_one(home: Path) -> None:
    started = 'ray.init("local", num_cpus=1, include_dashboard=False).address_info["gcs_address"]'
    start = f"import ray, sys; print({started}, flush=True); sys.stdin.read()"
    join = f"import ray; {CONNECT}; print(ray.get(ray.remote(lambda: 7).remote()))"
    ensure_token()
    code = [sys.executable, "-c", start]
    env = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    with subprocess.Popen(code, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as head:
        assert head.stdout is not None
        address = head.stdout.readline().strip()
        env = {**os.environ, "RAY_ADDRESS": address}
        result = subprocess.run([sys.executable, "-c", join], env=env, capture_output=True, text=True, timeout=120)
        head.communicate()
    assert result.stdout == "7\n", result.stderr
    assert "works without authentication" in result.stderr


def test_looking_starts_no_cluster(joined: Joined, head: Head, closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterError, match="no Ray cluster runs"):
        connect(start=False)
    only = head()
    on_this_machine(monkeypatch, only, head(token="of others"), latest=closed)
    connect(start=False)
    assert joined == [only]
    on_this_machine(monkeypatch, only, head())
    with pytest.raises(ClusterError, match="RAY_ADDRESS"):
        connect(start=False)


def test_a_token_is_made_where_there_is_none_and_ray_finds_it(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ensure_token()
    path = home / ".ray/auth_token"
    assert str(path) in capfd.readouterr().err
    assert path.stat().st_mode & 0o777 == 0o600
    token = path.read_text()
    code = "from ray._raylet import AuthenticationTokenLoader as L; print(L.instance().get_raw_token(True))"
    assert token in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    ensure_token()
    assert path.read_text() == token and not capfd.readouterr().err


def test_a_read_only_home_has_one_token_for_all(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / ".ray").touch()  # no folder can be made there
    ensure_token()
    path = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    assert path.is_relative_to(tmp_path / "tmp") and len(path.read_text()) == 64
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    ensure_token()
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(path)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    path.unlink()
    path.parent.chmod(0o755)
    with pytest.raises(ClusterError, check=about("RAY_AUTH_TOKEN_PATH")):
        ensure_token()  # others can look into the folder


def test_a_token_is_made_in_the_file_that_is_named(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secrets" / "token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    ensure_token()
    assert len(path.read_text()) == 64
    path.write_text("")
    ensure_token()
    assert len(path.read_text()) == 64 and not list(home.iterdir())


@pytest.mark.parametrize("variable", [("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN", "t")])
def test_no_token_is_made_that_nobody_asks_for(home: Path, monkeypatch: pytest.MonkeyPatch, variable: Any) -> None:
    monkeypatch.setenv(*variable)
    ensure_token()
    assert not list(home.iterdir())


def test_our_token_is_used_unless_the_mode_is_asked_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_token()
    assert "RAY_AUTH_MODE" not in os.environ, "there is none"
    ensure_token()
    use_token()
    assert os.environ["RAY_AUTH_MODE"] == "token"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    use_token()
    assert os.environ["RAY_AUTH_MODE"] == "disabled"
