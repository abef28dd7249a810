"""Image Folder Dataset, Encode Dataset, Dataset from Latents."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from comfy_api.latest import io, ui
from torch import Tensor

from ..trainer.errors import DatasetError, some
from ..trainer.families import FAMILIES, Family
from ..trainer.tensor_files import add_tensor
from . import host
from .guard import guarded
from .kinds import CATEGORY, Conditioning, Dataset, EncodedDataset, PictureFolder, Pictures
from .pictures import thumbnails, to_image


class ImageFolder(io.ComfyNode):
    """Pictures and captions of a folder, verified."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftImageFolder",
            display_name="Image Folder Dataset",
            category=CATEGORY,
            description=(
                "Pictures to learn from, each with its caption in a .txt file of the same name. Every file is opened "
                "and checked; all that are bad are named. A subfolder called 5_something is shown five times an epoch."
            ),
            search_aliases=["graft", "dataset", "training images", "captions", "load images", "lora dataset"],
            is_output_node=True,
            inputs=[
                io.Combo.Input(
                    "folder",
                    options=list(host.datasets()),
                    tooltip="A subfolder of ComfyUI's input folder, or of models/datasets.",
                ),
                io.String.Input(
                    "trigger",
                    default="",
                    tooltip="A word that is to call what is learned, such as zorb: put before every caption that does "
                    "not hold it yet. Empty for none.",
                ),
                io.String.Input(
                    "default_caption",
                    default="",
                    tooltip="The caption of pictures that have no .txt file. Empty, such pictures are refused by name.",
                ),
                io.Int.Input(
                    "resolution",
                    default=1024,
                    min=64,
                    max=2048,
                    step=64,
                    tooltip="Pictures are scaled and cropped to about this many pixels squared, in the shape nearest "
                    "to their own. 512 trains several times faster and fits small cards; 1024 shows more detail.",
                ),
                io.Boolean.Input(
                    "flip",
                    default=False,
                    tooltip="Mirrors every second showing, by chance: twice the variety from few pictures. Not where "
                    "left and right matter: writing, logos, a face with a parting.",
                ),
                io.Float.Input(
                    "caption_dropout",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.05,
                    advanced=True,
                    tooltip="Share of showings without the caption, so that a style is learned for every prompt. "
                    "0 to 0.1 is usual.",
                ),
                io.Int.Input(
                    "held_out",
                    default=0,
                    min=0,
                    max=10000,
                    advanced=True,
                    tooltip="So many pictures are not trained on but measured: their loss rises again when the LoRA "
                    "begins to learn by heart. Needs a set of more than about 20 pictures.",
                ),
            ],
            outputs=[
                Pictures.Output(display_name="pictures", tooltip="For Encode Dataset."),
                io.Image.Output(display_name="thumbnails", tooltip="The pictures on one sheet."),
                io.String.Output(display_name="report", tooltip="How many pictures, in which shapes."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, folder: str | None, default_caption: str | None) -> bool | str:
        """What can be said without decoding a picture; `execute` opens every file."""
        if folder is None or default_caption is None:  # one that comes from another node
            return True
        try:
            return _first_look(_folder(folder), bool(default_caption)) or True
        except (DatasetError, OSError) as error:
            return str(error)

    @classmethod
    def fingerprint_inputs(cls, folder: str | None, **others: Any) -> str:
        """Changes with every file of the folder: by name, size and time."""
        if folder is None:  # it comes from another node
            return ""
        found = _folder(folder)
        facts = [(path, path.stat()) for path in _files(found)]
        files = [(path.relative_to(found).as_posix(), stat.st_size, stat.st_mtime_ns) for path, stat in facts]
        return hashlib.sha256(json.dumps(files).encode()).hexdigest()

    @classmethod
    @guarded
    def execute(
        cls,
        folder: str,
        trigger: str,
        default_caption: str,
        resolution: int,
        flip: bool,
        caption_dropout: float,
        held_out: int,
    ) -> io.NodeOutput:
        from ..trainer.pictures import read_folder
        from ..trainer.samples import check_held_out

        path = _folder(folder)
        # Structured captions pass here if any family takes them; Encode Dataset, which knows the family, looks again.
        structured = next((family for family in FAMILIES.values() if family.json_captions), None)
        pictures = read_folder(path, structured, trigger.strip(), default_caption.strip())
        check_held_out(held_out, len(pictures), "pictures")
        report = _report(pictures, resolution)
        host.show_text(cls.hidden.unique_id, report)
        sheet = to_image(thumbnails([picture.path for picture in pictures]))
        chosen = PictureFolder(
            path, trigger.strip(), default_caption.strip(), resolution, flip, caption_dropout, held_out
        )
        return io.NodeOutput(chosen, sheet, report, ui=ui.PreviewImage(sheet, cls=cls))


def _folder(name: str) -> Path:
    found = host.datasets().get(name)
    if found is None:
        raise DatasetError(f"there is no folder {name!r}; put the pictures into a subfolder of ComfyUI's input folder")
    return found


def _files(folder: Path) -> list[Path]:
    """The files of a folder and its subfolders but hidden ones, such as the command line's cache."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


def _first_look(folder: Path, captioned: bool) -> str:
    """What is wrong with a folder, by the names in it; empty where nothing is."""
    from ..trainer.pictures import MASK, PICTURES

    pictures = [path for path in _files(folder) if path.suffix.lower() in PICTURES and not path.stem.endswith(MASK)]
    if not pictures:
        return f"{folder} holds no picture ({', '.join(PICTURES)})"
    bare = [path.name for path in pictures if not any(path.with_suffix(kind).is_file() for kind in (".txt", ".json"))]
    if bare and not captioned:
        return f"no caption for {some(sorted(bare))}: write a .txt file beside each, or set default_caption"
    return ""


def _report(pictures: list[Any], resolution: int) -> str:
    """Counts and shapes. Shapes are those of multiples of 16 pixels, which both families take."""
    from ..trainer.pictures import bucket

    shapes = Counter(bucket(picture.size, resolution, 16) for picture in pictures)
    showings = sum(picture.repeats for picture in pictures)
    masks = sum(picture.mask is not None for picture in pictures)
    small = [picture.name for picture in pictures if picture.size[0] * picture.size[1] < resolution**2 / 2]
    lines = [
        f"{len(pictures)} pictures" + (f", {showings} showings an epoch" if showings != len(pictures) else ""),
        "shapes: " + ", ".join(f"{count} of {width} × {height}" for (width, height), count in shapes.most_common()),
    ]
    if masks:
        lines.append(f"{masks} with a mask")
    if small:
        lines.append(f"enlarged, since they are smaller than the resolution: {some(small)}")
    return "\n".join(lines)


class EncodeDataset(io.ComfyNode):
    """Pictures and captions as latents and conditioning, kept on disk."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftEncodeDataset",
            display_name="Encode Dataset",
            category=CATEGORY,
            description=(
                "Turns pictures into latents and captions into conditioning, once: they are kept on disk, and only "
                "what has changed is encoded again. VAE and CLIP leave the card afterwards."
            ),
            search_aliases=["graft", "cache latents", "vae encode dataset", "encode captions"],
            inputs=[
                Pictures.Input("pictures", tooltip="From Image Folder Dataset."),
                io.Vae.Input("vae", tooltip="The model's own VAE: Qwen Image's for Krea 2, Flux 2's for Ideogram 4."),
                io.Clip.Input("clip", tooltip="The model's own text encoder, loaded with the type krea2 or ideogram4."),
                io.Model.Input("model", tooltip="From Load Model for LoRA Training: says what the latents must be."),
            ],
            outputs=[Dataset.Output(display_name="dataset", tooltip="For Train LoRA and Check Run.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    @guarded
    def execute(cls, pictures: PictureFolder, vae: Any, clip: Any, model: Any) -> io.NodeOutput:
        from ..trainer.pictures import read_folder
        from ..trainer.samples import encode_into

        file = host.hosted_base(model).file
        family = file.family
        found = read_folder(pictures.folder, family, pictures.trigger, pictures.default_caption)
        encoders = host.encoders_of(vae, clip, family)
        encoders = replace(encoders, text=_of_width(encoders.text, family.conditioning_width(file.config), family))
        # What acts while training alone is left out: another value needs no other tensors.
        encoded_as = str(replace(pictures, caption_dropout=0.0, held_out=0))
        folder = _encoded_folder(pictures.folder.name, family, [encoded_as, encoders.picture_id, encoders.text_id])
        bar = host.progress(cls.hidden.unique_id, len(found))
        try:
            encoded = encode_into(
                folder,
                found,
                family,
                pictures.resolution,
                encoders,
                pictures.flip,
                progress=bar.update,
            )
        finally:
            host.release(vae, clip)
        host.show_text(
            cls.hidden.unique_id,
            f"{encoded.count} pictures in {len(encoded.buckets)} buckets; {encoded.made} tensors encoded now, "
            f"{encoded.found} from before\n{encoded.bytes / 2**20:,.0f} MiB in {folder}",
        )
        return io.NodeOutput(
            EncodedDataset(folder, family.name, encoded.count, pictures.caption_dropout, pictures.held_out)
        )


def _of_width(text: Any, width: int, family: Family) -> Any:
    """The text encoder, with a word where its conditioning is another model's."""

    def encode(caption: str) -> Tensor:
        conditioning = text(caption)
        if conditioning.shape[-1] != width:
            raise DatasetError(
                f"the CLIP gives {conditioning.shape[-1]} features per token, {family.title} wants {width}: load the "
                f"text encoder with the type {family.name}"
            )
        return conditioning

    return encode


def _encoded_folder(name: str, family: Family, parts: list[str]) -> Path:
    """One folder for all that was asked for alike, so that two datasets of a graph never share one."""
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:10]
    plain = re.sub(r"[^\w.-]", "_", name)
    return host.output_directory() / "graft" / "encoded" / f"{plain}-{family.name}-{digest}"


class DatasetFromLatents(io.ComfyNode):
    """Latents and conditioning of other nodes as a dataset."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftDatasetFromLatents",
            display_name="Dataset from Latents",
            category=CATEGORY,
            description=(
                "A dataset from the LATENT and CONDITIONING of other nodes, such as ComfyUI's own dataset nodes: one "
                "conditioning for each latent, in the same order."
            ),
            search_aliases=["graft", "latent dataset", "conditioning dataset", "make training dataset"],
            is_input_list=True,
            inputs=[
                io.Latent.Input("latents", tooltip="As VAE Encode gives them; a list, or a batch, or both."),
                io.Conditioning.Input("conditioning", tooltip="One for each latent, in the same order."),
                io.Model.Input("model", tooltip="From Load Model for LoRA Training: says what the latents must be."),
                io.String.Input(
                    "captions",
                    optional=True,
                    force_input=True,
                    tooltip="What each conditioning was made of, one for each latent: kept with it, for you to read.",
                ),
                io.Conditioning.Input(
                    "empty",
                    optional=True,
                    tooltip="The conditioning of an empty prompt. Needed for caption dropout, and for previews of "
                    "Krea 2 without a negative.",
                ),
                io.Float.Input(
                    "caption_dropout",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.05,
                    advanced=True,
                    tooltip="Share of showings without the caption. 0 to 0.1 is usual.",
                ),
                io.Int.Input(
                    "held_out",
                    default=0,
                    min=0,
                    max=10000,
                    advanced=True,
                    tooltip="So many latents are not trained on but measured.",
                ),
            ],
            outputs=[Dataset.Output(display_name="dataset", tooltip="For Train LoRA and Check Run.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    @guarded
    def execute(
        cls,
        latents: list[dict[str, Any]],
        conditioning: list[Conditioning],
        model: list[Any],
        caption_dropout: list[float],
        held_out: list[int],
        captions: list[str] | None = None,
        empty: list[Conditioning] | None = None,
    ) -> io.NodeOutput:
        from ..trainer.samples import Sample, check_held_out, write_empty, write_sample

        file = host.hosted_base(model[0]).file
        family, width = file.family, file.family.conditioning_width(file.config)
        pictures = [picture for entry in latents for picture in _normalised(entry, family)]
        if len(conditioning) != len(pictures):
            raise DatasetError(
                f"there are {len(pictures)} latents and {len(conditioning)} conditionings; wanted one for each latent"
            )
        if captions and len(captions) != len(pictures):
            raise DatasetError(f"there are {len(pictures)} latents and {len(captions)} captions; wanted one for each")
        check_held_out(held_out[0], len(pictures), "latents")
        samples = []
        for index, (picture, entry) in enumerate(zip(pictures, conditioning, strict=True)):
            tokens = host.conditioning_tensor(entry, f"conditioning {index + 1}", width)
            caption = captions[index] if captions else ""
            samples.append(Sample(f"{index:05}", caption, picture, tokens))
        nothing = host.conditioning_tensor(empty[0], "the empty prompt", width) if empty else None
        tensors = [tensor for sample in samples for tensor in sample.tensors]
        tensors += [] if nothing is None else [nothing]
        folder = _encoded_folder("latents", family, [_digest(tensors), *(captions or [])])
        folder.mkdir(parents=True, exist_ok=True)
        for sample in samples:
            write_sample(folder, sample, family, overwrite=True)
        if nothing is not None:
            write_empty(folder, nothing)
        host.show_text(cls.hidden.unique_id, f"{len(samples)} latents in {folder}")
        return io.NodeOutput(EncodedDataset(folder, family.name, len(samples), caption_dropout[0], held_out[0]))


def _normalised(entry: dict[str, Any], family: Family) -> list[Tensor]:
    """A LATENT, which may be a batch, as latents (C, h, w) in the family's normalised space."""
    if entry.get("noise_mask") is not None:
        raise DatasetError(
            "a latent carries a noise mask, which Dataset from Latents does not train with; weigh the loss by "
            "name.mask.png files and Image Folder Dataset"
        )
    latents = host.normalised_latents(entry["samples"], family)
    if latents.ndim != 4 or latents.shape[1] != family.latent_channels:
        raise DatasetError(
            f"a latent is {list(latents.shape)}, {family.title} wants [batch, {family.latent_channels}, h, w]: encode "
            "the pictures with the model's own VAE"
        )
    if any(side % family.latent_multiple for side in latents.shape[2:]):
        multiple = family.latent_multiple * family.latent_downscale
        raise DatasetError(f"a latent is {list(latents.shape)}: make the pictures' sides multiples of {multiple}")
    return [picture.clone() for picture in latents]


def _digest(tensors: list[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(str(tensor.dtype).encode())
        add_tensor(digest, tensor)
    return digest.hexdigest()
