"""Every mode becomes RGB, bad files are named, and the header's size is the opened image's size."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms, PngImagePlugin

from entrain_opt.errors import WorkloadError
from entrain_opt.workload.images import open_image, read_image_size

JPEG = sorted((Path(__file__).resolve().parents[2] / "recipes/data/physics/images").iterdir())[0]
SIZE = (7, 5)


def grey(value: int) -> Image.Image:
    return Image.new("L", SIZE, value)


MODES = {
    "1.png": Image.new("1", SIZE, 1),
    "L.png": grey(255),
    "LA.png": Image.merge("LA", (grey(0), grey(0))),
    "P.png": grey(255).convert("P"),
    "RGB.jpg": Image.new("RGB", SIZE, "white"),
    "RGBA.png": Image.new("RGBA", SIZE, (0, 0, 0, 0)),
    "CMYK.jpg": Image.new("CMYK", SIZE, (0, 0, 0, 0)),
    "YCbCr.jpg": Image.new("YCbCr", SIZE, (255, 128, 128)),
    "I16.png": Image.fromarray(np.full(SIZE[::-1], 65535, dtype=np.uint16)),
    "I.tiff": Image.new("I", SIZE, 65535),
    "F.tiff": Image.new("F", SIZE, 255.0),
    "LAB.tiff": Image.new("LAB", SIZE, (255, 128, 128)),
    "RGBA.webp": Image.new("RGBA", SIZE, (0, 0, 0, 0)),
    "RGB.bmp": Image.new("RGB", SIZE, "white"),
    "P.gif": grey(255).convert("P"),
}


@pytest.mark.parametrize("name", MODES)
def test_every_mode_becomes_rgb(name, tmp_path):
    """All of these are white, or transparent and therefore white."""
    MODES[name].save(tmp_path / name)
    image = open_image(tmp_path / name)
    assert image.mode == "RGB"
    assert image.size == SIZE == read_image_size(tmp_path / name)
    assert np.asarray(image).min() >= 250


def test_transparent_palette_and_transparent_colour_are_white(tmp_path):
    palette = Image.new("P", SIZE, 3)
    palette.putpalette([9, 9, 9] * 256)
    palette.save(tmp_path / "palette.png", transparency=3)
    Image.new("RGB", SIZE, (1, 2, 3)).save(tmp_path / "colour.png", transparency=(1, 2, 3))
    for name in ("palette.png", "colour.png"):
        assert np.asarray(open_image(tmp_path / name)).min() == 255


def test_sixteen_bit_grey_keeps_its_shades(tmp_path):
    Image.fromarray(np.array([[0, 256, 32768, 65535]], dtype=np.uint16)).save(tmp_path / "a.png")
    assert np.asarray(open_image(tmp_path / "a.png"))[0, :, 0].tolist() == [0, 1, 128, 255]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tiff"])
def test_orientation_is_applied_and_seen_in_the_header(orientation, suffix, tmp_path):
    from PIL import ImageOps

    values = np.arange(6 * 4 * 3, dtype=np.uint8).reshape(6, 4, 3)
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(values).save(path, exif=exif)
    image = open_image(path)
    with Image.open(path) as reference:
        upright = ImageOps.exif_transpose(reference).convert("RGB")
    assert read_image_size(path) == image.size == upright.size
    assert image.size == ((6, 4) if orientation >= 5 else (4, 6))
    assert np.array_equal(np.asarray(image), np.asarray(upright))


def test_first_frame_of_an_animation(tmp_path):
    path = tmp_path / "a.gif"
    Image.new("RGB", SIZE, "red").save(path, save_all=True, append_images=[Image.new("RGB", SIZE, "blue")])
    assert open_image(path).getpixel((0, 0)) == (255, 0, 0)
    assert read_image_size(path) == SIZE


def test_colour_profile_does_not_matter_to_the_mode(tmp_path):
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    Image.new("RGB", SIZE, "white").save(tmp_path / "a.png", icc_profile=profile)
    assert np.asarray(open_image(tmp_path / "a.png")).min() == 255


def huge_png() -> bytes:
    """A valid header of 60,000 x 60,000 pixels with hardly any pixels behind it."""
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0)
    chunks = b""
    for kind, content in ((b"IHDR", header), (b"IDAT", zlib.compress(b"0")), (b"IEND", b"")):
        chunks += struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    return b"\x89PNG\r\n\x1a\n" + chunks


def text_bomb_png() -> bytes:
    text = PngImagePlugin.PngInfo()
    text.add_text("comment", "x" * (2 << 20), zip=True)
    buffer = io.BytesIO()
    Image.new("RGB", SIZE).save(buffer, "PNG", pnginfo=text)
    return buffer.getvalue()


def bogus_gif() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", SIZE).save(buffer, "GIF")
    return buffer.getvalue()[:6] + struct.pack("<HH", 65535, 65535) + buffer.getvalue()[10:]


BAD_FILES = {
    "half.jpg": (lambda: JPEG.read_bytes()[: JPEG.stat().st_size // 2], "truncated"),
    "text.jpg": (lambda: b"this is no image", "no known image format"),
    "empty.png": (lambda: b"", "no known image format"),
    "huge.png": (huge_png, "decompression bomb|max_pixels"),
    "bomb.png": (text_bomb_png, "too large|limit|Decompressed"),
    "bogus.gif": (bogus_gif, "decompression bomb|max_pixels"),
}


@pytest.mark.parametrize("name", BAD_FILES)
@pytest.mark.parametrize("read", [open_image, read_image_size])
def test_bad_files_are_named_with_the_reason(name, read, tmp_path):
    make, reason = BAD_FILES[name]
    (tmp_path / name).write_bytes(make())
    with pytest.raises(WorkloadError, match=f"{name}.*({reason})"):
        read(tmp_path / name)


@pytest.mark.parametrize("suffix", ["png", "gif", "webp", "bmp", "tiff", "jpg"])
def test_truncated_files_are_seen_without_decoding_whole_ones(suffix, tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, size=(64, 64, 3), dtype=np.uint8)
    whole, cut = tmp_path / f"whole.{suffix}", tmp_path / f"cut.{suffix}"
    Image.fromarray(noise).save(whole)
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size * 2 // 3])
    assert read_image_size(whole) == (64, 64)
    with pytest.raises(WorkloadError, match=cut.name):
        read_image_size(cut)


def test_jpeg_with_bytes_behind_its_end_is_fine(tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(JPEG.read_bytes() + b"appended by a camera")
    assert read_image_size(path) == read_image_size(JPEG) == open_image(path).size


@pytest.mark.parametrize("read", [open_image, read_image_size])
def test_missing_file_and_limit(read, tmp_path):
    with pytest.raises(WorkloadError, match=r"gone\.png: file not found"):
        read(tmp_path / "gone.png")
    with pytest.raises(WorkloadError, match="max_pixels = 10"):
        read(JPEG, max_pixels=10)
