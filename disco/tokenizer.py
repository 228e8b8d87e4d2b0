"""The tokenizer of a corpus: the model's own, or a byte-level BPE trained on it."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from disco.config import ConfigError, Experiment

END = "<|endoftext|>"  # the trained tokenizer's one special token: bos, eos and pad


def check_tokenizer(config: Experiment) -> None:
    """Refuse a tokenizer that does not go with the model, before anything is read. Raises ConfigError."""
    wanted, model = config.corpus.tokenizer, config.model
    if wanted.kind == "model":
        if model.source is None:
            raise ConfigError(
                "corpus.tokenizer.kind is model but model.config starts from scratch and has no tokenizer: "
                "set corpus.tokenizer.kind=train or name a model.source"
            )
        return
    if model.source is not None:
        raise ConfigError(
            f"corpus.tokenizer.kind is train but model.source '{model.source}' has learnt its own tokenizer's "
            "ids: set corpus.tokenizer.kind=model or start from scratch with model.config"
        )
    least = 256 + 1
    if wanted.vocab_size < least:
        raise ConfigError(
            f"corpus.tokenizer.vocab_size is {wanted.vocab_size}: a byte-level BPE needs at least {least} "
            f"(256 bytes and {END})"
        )
    room = model.config.get("vocab_size")
    if isinstance(room, int) and wanted.vocab_size > room:
        raise ConfigError(
            f"corpus.tokenizer.vocab_size is {wanted.vocab_size} but model.config.vocab_size is {room}: "
            f"set corpus.tokenizer.vocab_size={room} or less"
        )


def special_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """bos, eos and pad ids; bos and pad fall back to eos."""
    eos = tokenizer.eos_token_id
    if eos is None:
        raise ConfigError(
            f"the tokenizer of '{tokenizer.name_or_path}' has no end-of-sequence token: set eos_token in its "
            "tokenizer_config.json"
        )
    bos, pad = tokenizer.bos_token_id, tokenizer.pad_token_id
    return {"bos": eos if bos is None else bos, "eos": eos, "pad": eos if pad is None else pad}


def vocabulary(tokenizer: PreTrainedTokenizerBase) -> int:
    """Rows an embedding needs for every id of the tokenizer, gaps in its numbering included."""
    return max(tokenizer.get_vocab().values()) + 1


def train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE (Radford et al. 2019) of at most `vocab_size` ids, the same for the same texts."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer=trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=END, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Ids of each text, none added. Text that spells a special token stays text: it must not end a document."""
    return tokenizer(
        texts,
        add_special_tokens=False,
        split_special_tokens=True,
        return_attention_mask=False,
        verbose=False,
    )["input_ids"]


def model_tokenizer(config: Experiment, model_folder: Path | None) -> PreTrainedTokenizerBase:
    """The model's tokenizer, checked against the model's vocabulary."""
    place = str(model_folder or config.model.source)
    revision = {} if model_folder else {"revision": config.model.revision}
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, **revision)
        room = AutoConfig.from_pretrained(place, **revision).get_text_config().vocab_size
    except Exception as error:  # transformers passes on whatever its reader or the network raises
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"model.source '{place}': its tokenizer cannot be opened ({reason}): give a model folder or hub name "
            "that holds a tokenizer"
        ) from None
    special_ids(tokenizer)
    if (size := vocabulary(tokenizer)) > room:
        raise ConfigError(
            f"model.source '{place}': its tokenizer has ids up to {size - 1} but the model's vocab_size is {room}: "
            "use the tokenizer the model was trained with, or enlarge its embedding"
        )
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> PreTrainedTokenizerBase:
    """Save, and hand back what a reader of the corpus will open: that one makes the tokens."""
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)
