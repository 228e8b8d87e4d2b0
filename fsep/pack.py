"""Fill bins in proportion to their capacity with as few cuts as there are slots for.

Walker's alias construction, with C slots instead of two: a bin takes some whole items and tops up with a piece of
the largest, whose remainder goes back. With at least B - 1 spare slots for B bins every bin is filled exactly;
with fewer, the first bins take whole items whose sum comes closest, and swaps even them out.

Shapes: M items, B bins.
"""

from __future__ import annotations

import numpy as np

from fsep.jit import jit


@jit
def pack(size_M, cap_B, slots_B, spaced):
    """Assign items, or pieces of them, to bins in proportion to ``cap_B``.

    Args:
        size_M: int64 item sizes. cap_B: int64 relative capacities. slots_B: int64, the most pieces a bin takes;
            their sum is at least M.

    Returns:
        amount [B, M] int64, sizes of the pieces, and held [B, M] bool (a piece may have size zero).
    """
    M, B = len(size_M), len(cap_B)
    amount_BM = np.zeros((B, M), np.int64)
    held_BM = np.zeros((B, M), np.bool_)
    # The m items left, ascending.
    item = np.argsort(size_M, kind="mergesort")
    size = size_M[item]
    m = M
    slots_left, cap_left, left = slots_B.sum(), cap_B.sum(), size_M.sum()
    exact = True
    for b in range(B):
        if m == 0:
            break
        bins = B - b
        spare = slots_left - m
        slots_left -= slots_B[b]
        want = left * cap_B[b] // cap_left
        cap_left -= cap_B[b]
        need = max(0, m - slots_left)
        first, count, step, extra, piece = 0, m, 1, -1, 0
        if bins > 1:
            if spare >= bins - 1 or (spare > 0 and size[m - 1] > want):
                if spare >= bins - 1:
                    # Later bins keep a spare slot for each cut between them.
                    need = max(0, m - slots_left + bins - 2)
                first, count, step, piece = _with_cut(size, m, want, need, slots_B[b] - 1, (m - 1) // bins, spaced)
            else:
                exact = False
                first, count, extra = _whole(size, m, want, min(slots_B[b], m))
        largest = size[m - 1]
        if piece > 0 or extra >= 0:
            k = m - 1 if piece > 0 else extra
            amount_BM[b, item[k]] = piece if piece > 0 else size[k]
            held_BM[b, item[k]] = True
        keep = 0
        for k in range(m):
            if 0 <= k - first < count * step and (k - first) % step == 0:
                amount_BM[b, item[k]] = size[k]
                held_BM[b, item[k]] = True
            elif k != extra and not (k == m - 1 and piece == largest and piece > 0):
                item[keep], size[keep] = item[k], size[k]
                keep += 1
        m = keep
        if 0 < piece < largest:
            size[m - 1] -= piece
            k = m - 1
            while k > 0 and size[k - 1] > size[k]:
                size[k - 1], size[k] = size[k], size[k - 1]
                item[k - 1], item[k] = item[k], item[k - 1]
                k -= 1
        left -= amount_BM[b].sum()
    if not exact:
        _swap(amount_BM, held_BM, cap_B)
    return amount_BM, held_BM


@jit
def _with_cut(size, m, want, need, most, usual, spaced):
    """Whole items and a piece of the last one that make up ``want``: (first, count, step, piece).

    The whole items are neighbours in size (step 1) or, with ``spaced``, spread over the sizes where that works.
    """
    most = min(most, m - 1)
    need = min(need, most)
    count = min(max(usual, need), most)
    while count > need and size[:count].sum() > want:
        count -= 1
    while True:
        for step in (max(1, (m - 1) // max(count, 1)) if spaced else 1, 1):
            for first in range(max(1, m - 1 - (count - 1) * step)):
                total = np.int64(0)
                for k in range(count):
                    total += size[first + k * step]
                if total > want:
                    break
                if total + size[m - 1] >= want:
                    return first, count, step, want - total
        if count == most:
            break
        count += 1
    # Everything is too small, or (more items than room) too large.
    first = 0 if size[:count].sum() + size[m - 1] >= want else m - 1 - count
    total = size[first : first + count].sum()
    return first, count, 1, max(0, min(want - total, size[m - 1]))


@jit
def _whole(size, m, want, count):
    """``count`` whole items, all but one of them neighbours in size, whose sum is closest to ``want``.

    Returns the first neighbour, their number and the one outside (-1 when everything left is taken).
    """
    if count >= m:
        return 0, m, -1
    best, best_first, best_extra = np.int64(1) << 62, 0, count - 1
    total = size[: count - 1].sum()
    for first in range(m - count + 2):
        gap = want - total
        k = np.searchsorted(size[:m], gap)
        below, above = k - 1, k
        while first <= below < first + count - 1:
            below -= 1
        while first <= above < first + count - 1:
            above += 1
        for extra in (below, above):
            if 0 <= extra < m and abs(size[extra] - gap) < best:
                best, best_first, best_extra = abs(size[extra] - gap), first, extra
        if first + count - 1 < m:
            total += size[first + count - 1] - size[first]
    return best_first, count - 1, best_extra


@jit
def _swap(amount_BM, held_BM, cap_B):
    """Exchange pieces between the fullest bin and another while the fullest gets less full."""
    B, M = amount_BM.shape
    load_B = amount_BM.sum(1)
    for _ in range(8 * B):
        a = np.argmax(load_B / cap_B)
        high = load_B[a] / cap_B[a]
        best, best_b, best_x, best_y = high, -1, -1, -1
        for b in range(B):
            if b == a or load_B[b] / cap_B[b] >= high:
                continue
            for x in range(M):
                if not held_BM[a, x] or held_BM[b, x]:
                    continue
                for y in range(M):
                    if not held_BM[b, y] or held_BM[a, y]:
                        continue
                    delta = amount_BM[a, x] - amount_BM[b, y]
                    if delta <= 0:
                        continue
                    worse = max((load_B[a] - delta) / cap_B[a], (load_B[b] + delta) / cap_B[b])
                    if worse < best:
                        best, best_b, best_x, best_y = worse, b, x, y
        if best_b < 0:
            break
        b, x, y = best_b, best_x, best_y
        delta = amount_BM[a, x] - amount_BM[b, y]
        load_B[a] -= delta
        load_B[b] += delta
        amount_BM[b, x], amount_BM[a, x] = amount_BM[a, x], 0
        amount_BM[a, y], amount_BM[b, y] = amount_BM[b, y], 0
        held_BM[b, x], held_BM[a, x] = True, False
        held_BM[a, y], held_BM[b, y] = True, False
