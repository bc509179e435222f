"""The server of a page: only its own address on this host gets it, by GET only."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from flk.errors import UnreachableError
from flk.report.model import Report
from flk.report.server import ReportServer
from tests.support.reports import report


class Jobs:
    """What is read of a job: a report, or an error."""

    def __init__(self) -> None:
        self.reads, self.error = 0, False

    def __call__(self) -> list[Report]:
        self.reads += 1
        if self.error:
            raise UnreachableError("the API server does not answer")
        return [report()]


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


@pytest.fixture
def server(jobs: Jobs) -> Iterator[ReportServer]:
    server = ReportServer(jobs, None)
    thread = threading.Thread(target=server.serve)
    thread.start()
    yield server
    server._server.shutdown()
    thread.join()
    server.close()


def ask(server: ReportServer, path: str = "", *, method: str = "GET", host: str = "") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        headers = {"Host": host} if host else {}
        connection.request(method, path or urlsplit(server.url).path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_the_page_and_its_content_are_served(server: ReportServer) -> None:
    path = urlsplit(server.url).path
    status, page = ask(server)
    assert (status, "<!doctype html>" in page) == (200, True)
    status, content = ask(server, f"{path}content")
    assert (status, content in page) == (200, True)


@pytest.mark.parametrize("path", ["/", "/content", "/wrong-token/", "/{token}", "/{token}/../", "/{token}/etc/passwd"])
def test_other_paths_are_not(server: ReportServer, jobs: Jobs, path: str) -> None:
    token = urlsplit(server.url).path.strip("/")
    assert ask(server, path.format(token=token))[0] == 404
    assert jobs.reads == 0


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "evil.example:{port}", "127.0.0.1.evil.example:{port}"])
def test_a_name_that_was_bound_to_this_machine_is_refused(server: ReportServer, jobs: Jobs, host: str) -> None:
    assert ask(server, host=host.format(port=server.port))[0] == 403
    assert jobs.reads == 0


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_other_methods_are_refused(server: ReportServer, jobs: Jobs, method: str) -> None:
    assert ask(server, method=method)[0] == 405
    assert jobs.reads == 0


def test_it_listens_on_this_host_only(server: ReportServer) -> None:
    assert server._server.server_address[0] == "127.0.0.1"


def test_two_servers_have_two_tokens(server: ReportServer, jobs: Jobs) -> None:
    other = ReportServer(jobs, None)
    other.close()
    assert urlsplit(server.url).path != urlsplit(other.url).path
    assert len(urlsplit(server.url).path) > 30


def test_windows_share_what_was_read(server: ReportServer, jobs: Jobs) -> None:
    assert [ask(server)[0] for _ in range(3)] == [200] * 3
    assert jobs.reads == 1


def test_a_window_that_is_closed_before_its_answer_is_no_error(
    server: ReportServer, capsys: pytest.CaptureFixture[str]
) -> None:
    for error, told in ((BrokenPipeError(), False), (ConnectionResetError(), False), (KeyError("pods"), True)):
        try:
            raise error
        except type(error):
            server._server.handle_error(None, ("127.0.0.1", 1))
        assert ("Traceback" in capsys.readouterr().err) == told


def test_an_outage_is_said_and_ends_nothing(server: ReportServer, jobs: Jobs) -> None:
    jobs.error = True
    assert ask(server) == (503, "the API server does not answer")
    jobs.error = False
    assert ask(server)[0] == 200
