"""Downloads from a server that breaks off, ignores ranges or sends the wrong bytes."""

import errno
import gzip
import hashlib
import http.server
import io
import re
import tarfile
import threading
from pathlib import Path

import pytest
from data_files import ALL, X28, Y3, idx, put, records, refused

import tasks
from optimizees import datasets, files


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves server.files; can break off after some bytes, and can ignore Range."""

    def do_GET(self):
        s = self.server
        content = s.files.get(self.path.lstrip("/"))
        given = self.headers.get("Range")
        s.requests.append((self.path.lstrip("/"), given))
        if content is None:
            return self.send_error(404)
        start = int(given.removeprefix("bytes=").rstrip("-")) if given and s.ranges else 0
        if start >= len(content):
            return self.send_error(416)
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        stop = len(content) if s.breaks_at is None else s.breaks_at
        self.wfile.write(content[start:stop])

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    s = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    s.files, s.requests, s.ranges, s.breaks_at = {}, [], True, None
    s.url = f"http://127.0.0.1:{s.server_port}"
    thread = threading.Thread(target=s.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield s
    s.shutdown()
    thread.join()
    s.server_close()


def tar(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


TAR = "cifar-10-binary.tar.gz"


@pytest.fixture
def archive(server, monkeypatch) -> bytes:
    content = tar({f"cifar-10-batches-bin/{name}": records(2) for name in ALL})
    server.files[TAR] = content
    monkeypatch.setitem(files.MD5, TAR, hashlib.md5(content).hexdigest())
    return content


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_download_and_load(server, archive, tmp_path):
    files.download("cifar10", tmp_path, server.url)
    assert len(datasets.load("cifar10", tmp_path, check=False)) == 10
    assert names(tmp_path / "cifar10") == ["cifar-10-batches-bin", TAR]
    files.download("cifar10", tmp_path, server.url)
    assert server.requests == [(TAR, None)]  # it was there and right


def test_download_resumes(server, archive, tmp_path):
    server.breaks_at = 5000
    with pytest.raises(OSError, match=rf"stopped after 5000 of {len(archive)} bytes.*goes on"):
        files.download("cifar10", tmp_path, server.url)
    assert names(tmp_path / "cifar10") == [f"{TAR}.part"]
    server.breaks_at = None
    files.download("cifar10", tmp_path, server.url)
    assert server.requests == [(TAR, None), (TAR, "bytes=5000-")]
    assert (tmp_path / "cifar10" / TAR).read_bytes() == archive
    assert names(tmp_path / "cifar10") == ["cifar-10-batches-bin", TAR]


def test_download_restarts_when_range_is_ignored(server, archive, tmp_path):
    put(tmp_path / "cifar10" / f"{TAR}.part", b"the beginning of something else")
    server.ranges = False
    files.download("cifar10", tmp_path, server.url)
    assert server.requests[0][1] == "bytes=31-"
    assert (tmp_path / "cifar10" / TAR).read_bytes() == archive


def test_download_of_a_part_that_is_whole(server, archive, tmp_path):
    put(tmp_path / "cifar10" / f"{TAR}.part", archive)
    files.download("cifar10", tmp_path, server.url)  # the server answers 416
    assert names(tmp_path / "cifar10") == ["cifar-10-batches-bin", TAR]


def test_download_checks_before_it_renames(server, archive, tmp_path):
    server.files[TAR] = archive[:-1] + b"!"
    with refused(f"{TAR} came with the wrong checksum", "it was deleted, ask again"):
        files.download("cifar10", tmp_path, server.url)
    assert names(tmp_path / "cifar10") == []
    put(tmp_path / "cifar10" / f"{TAR}.part", b"a bad beginning")
    server.files[TAR] = archive
    with refused("wrong checksum"):  # resumed onto the wrong bytes
        files.download("cifar10", tmp_path, server.url)
    files.download("cifar10", tmp_path, server.url)  # and the next one starts clean


def test_download_of_several_files(server, tmp_path, monkeypatch):
    for prefix in ("train", "t10k"):
        for kind, array in (("images-idx3", X28), ("labels-idx1", Y3)):
            name = f"{prefix}-{kind}-ubyte.gz"
            server.files[name] = gzip.compress(idx(array))
            monkeypatch.setitem(files.MD5, name, hashlib.md5(server.files[name]).hexdigest())
    files.download("fashion", tmp_path, server.url)
    assert len(datasets.load("fashion", tmp_path, check=False)) == 3
    assert len(datasets.load("fashion", tmp_path, split="test", check=False)) == 3
    put(tmp_path / "fashion-mnist/t10k-labels-idx1-ubyte.gz", b"damaged")
    files.download("fashion", tmp_path, server.url)
    assert len(server.requests) == 5  # only the damaged one again


def test_download_tells_what_is_wrong(server, tmp_path):
    with pytest.raises(OSError, match=r"cifar-10-binary.tar.gz: HTTP Error 404"):
        files.download("cifar10", tmp_path, server.url)
    with pytest.raises(OSError, match=r"python.tar.gz: .*refused"):
        files.download("cifar10-python", tmp_path, "http://127.0.0.1:9")
    for name, where in [("imagenet32", "image-net.org"), ("lm1b", "www.statmt.org")]:
        with refused(f"{name!r} is not for download: unpack", where):
            files.download(name, tmp_path)
    with refused("'cifar' is not for download: there are cifar10, cifar10-python, fashion"):
        files.download("cifar", tmp_path)


def test_command_line(tmp_path, complaint):
    said = complaint(tasks, "download", "imagenet32", "--data-dir", tmp_path)
    assert said.splitlines()[-1].endswith("https://image-net.org/download-images there.")


def test_unpacking_stays_in_its_folder(server, tmp_path, monkeypatch):
    server.files[TAR] = tar({"fine.bin": b"fine", "../../outside": b"evil"})
    monkeypatch.setitem(files.MD5, TAR, hashlib.md5(server.files[TAR]).hexdigest())
    with refused(f"{TAR} was not unpacked", "get it again"):
        files.download("cifar10", tmp_path / "root", server.url)
    assert not list(tmp_path.rglob("outside"))
    assert names(tmp_path / "root/cifar10") == [TAR]


def test_a_full_disk_is_not_the_archives_fault(server, archive, tmp_path, monkeypatch):
    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "extractall", full)
    with refused(f"{TAR} was not unpacked", "No space left", "make room there"):
        files.download("cifar10", tmp_path, server.url)
    assert names(tmp_path / "cifar10") == [TAR]


def test_published_checksums():
    assert files.MD5["cifar-10-binary.tar.gz"] == "c32a1d4ab5d03f1284b67883e8d87530"
    assert files.MD5["cifar-10-python.tar.gz"] == "c58f30108f718f92721af3b95e74349a"
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in files.SHA256.values())
    assert {file for _, _, files in files.DOWNLOADS.values() for file in files} == set(files.MD5)
