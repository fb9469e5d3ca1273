/* Put broken and sound produce requests and answers through kproxy/plain/wire.h, under AddressSanitizer and
 * UndefinedBehaviorSanitizer (`make fuzz`): wire ROUNDS SEED.
 *
 * Every round makes a request of a random version and shape, changes it or not, and gives it in a buffer of exactly its
 * size. What is indexed must lie within it, in order. An unchanged request is indexed with the partition indexes and the
 * sizes of records that it was made with, and one with an over-long varint is not indexed. Its parts are requests that are indexed alike, and the answer
 * written for it is a success, and so it is in another order; a changed answer is only read. With libFuzzer
 * (-DKP_LIBFUZZER) the input is the request.
 */
#include <stdio.h>
#include <stdlib.h>

#include "wire.h"

static uint64_t state;
static uint32_t draw(uint32_t below) {
    state ^= state << 13; state ^= state >> 7; state ^= state << 17;
    return below ? (uint32_t)((state >> 11) % below) : 0;
}

static void expect(int holds, const char *what) {
    if (!holds) { fprintf(stderr, "wire: %s\n", what); abort(); }
}

static kp_topic topics[KP_MAX_PARTITIONS], part_topics[KP_MAX_PARTITIONS];
static kp_entry entries[KP_MAX_PARTITIONS], part_entries[KP_MAX_PARTITIONS];
static uint32_t chosen[KP_MAX_PARTITIONS], results[KP_MAX_PARTITIONS], all[KP_MAX_PARTITIONS];
static uint16_t places[KP_MAX_SORTED_INDEX];
static unsigned long indexed, met, in_order;

/* The index lies within the frame, each thing behind the one before. */
static void check_index(const kp_request *request, uint32_t size) {
    uint32_t offset = request->topics_start, count = 0;
    for (uint32_t place = 0; place < request->topic_count; place++) {
        const kp_topic *topic = topics + place;
        expect(topic->head_start >= offset && topic->name_start >= topic->head_start, "a name is out of place");
        expect(topic->name_end > topic->name_start && topic->first == count && topic->count > 0, "a topic is empty");
        offset = topic->name_end;
        for (uint32_t ordinal = 0; ordinal < topic->count; ordinal++, count++) {
            const kp_entry *entry = entries + count;
            expect(entry->start >= offset && entry->records > entry->start, "an entry is out of place");
            expect(entry->end > entry->records && entry->topic == place, "an entry is empty");
            offset = entry->end;
        }
        expect(topic->tail_start == offset && topic->tail_end >= offset, "a topic's end is out of place");
        offset = topic->tail_end;
    }
    expect(count == request->entry_count && request->topics_end == offset && offset <= size, "the index is too long");
}

static void check_part(const uint8_t *frame, const kp_request *request) {
    uint32_t count = 0;
    for (uint32_t at = 0; at < request->entry_count; at++)
        if (draw(2)) chosen[count++] = at;
    if (!count) chosen[count++] = draw(request->entry_count);
    uint32_t bytes = kp_part_bytes(request, topics, entries, chosen, count);
    uint8_t *part = malloc(bytes);
    kp_part(frame, request, topics, entries, chosen, count, 77, part, bytes);
    kp_request again;
    expect(kp_scan(part, bytes, &again, part_topics, part_entries), "a part is not indexed");
    expect(again.entry_count == count && again.correlation_id == 77, "a part has other entries");
    for (uint32_t at = 0; at < count; at++) {
        const kp_entry *whole = entries + chosen[at], *piece = part_entries + at;
        uint32_t size = whole->end - whole->start;
        expect(piece->end - piece->start == size, "an entry of a part has another size");
        expect(!memcmp(frame + whole->start, part + piece->start, size), "an entry of a part has other bytes");
    }
    free(part);
}

/* The results of a topic in another order are put back. */
static void check_sort(const uint8_t *frame, const kp_request *request, const uint8_t *answer, uint32_t bytes) {
    uint32_t count = request->entry_count, size = kp_result_bytes(request->version);
    if (count < 2 || bytes > 1 << 20) return;
    uint8_t *other = malloc(bytes), *spare = malloc(bytes), *held = malloc(size);
    memcpy(other, answer, bytes);
    for (uint32_t at = 0; at < count; at++) {
        uint32_t with = draw(count);
        if (entries[at].topic != entries[with].topic) continue;
        memcpy(held, other + results[at], size);
        memmove(other + results[at], other + results[with], size);
        memcpy(other + results[with], held, size);
    }
    int is_sorted = kp_sort(frame, request, topics, entries, all, count, other, bytes, spare, places, results);
    int names_twice = 0, too_high = 0;
    for (uint32_t at = 0; at < count; at++) {
        too_high |= (uint32_t)entries[at].partition_index >= KP_MAX_SORTED_INDEX;
        for (uint32_t with = 0; with < at && count <= 64; with++)
            names_twice |= entries[at].partition_index == entries[with].partition_index;
    }
    if (is_sorted) expect(!memcmp(other, answer, bytes), "an answer is put into another order");
    else expect(names_twice || too_high || count > 64 || request->topic_count > 1, "an answer is not put into order");
    in_order += (unsigned long)is_sorted;
    free(other); free(spare); free(held);
}

static void check_answer(const uint8_t *frame, const kp_request *request) {
    uint32_t count = request->entry_count;
    for (uint32_t at = 0; at < count; at++) all[at] = at;
    uint32_t bytes = kp_answer_bytes(request, topics, entries, all, count);
    uint8_t *answer = malloc(bytes);
    kp_put_answer(frame, request, topics, answer, bytes, results);
    for (uint32_t at = 0; at < count; at++) {
        static const uint8_t flexible[3] = {1, 0, 0}, eighth[6] = {0, 0, 0, 0, 0xFF, 0xFF};
        uint32_t end = results[at] + 6 + kp_offsets_bytes(request->version), end_bytes = kp_end_bytes(request->version);
        expect(end + end_bytes <= bytes, "a result is beyond the answer");
        memset(answer + results[at], 0, end - results[at]);
        kp_put_int32(answer + results[at], entries[at].partition_index);
        memcpy(answer + end, request->version >= KP_FLEXIBLE_FROM ? flexible : eighth, end_bytes);
    }
    expect(kp_is_success(frame, request, topics, entries, all, count, answer, bytes, results), "a success is not seen");
    check_sort(frame, request, answer, bytes);
    for (int changes = 0; changes < 3; changes++) {
        uint32_t size = draw(4) ? bytes : draw(bytes + 1);
        uint8_t *changed = malloc(size ? size : 1);
        memcpy(changed, answer, size);
        if (size && draw(4)) changed[draw(size)] = (uint8_t)draw(256);
        met += (unsigned long)kp_is_success(
            frame, request, topics, entries, all, count, changed, size, results);
        if (size == bytes && count > 1) {
            uint8_t *spare = malloc(size);
            kp_sort(frame, request, topics, entries, all, count, changed, size, spare, places, results);
            free(spare);
        }
        free(changed);
    }
    free(answer);
}

/* What `make` has put into a request; `form` tells what is known of it. */
static enum { SOUND, OVER_LONG, CHANGED } form = CHANGED;
static int32_t made_indexes[KP_MAX_PARTITIONS];
static uint32_t made_lengths[KP_MAX_PARTITIONS], made_count;

static void check_made(const kp_request *request) {
    expect(request->entry_count == made_count, "a request is indexed with other entries");
    for (uint32_t at = 0; at < made_count; at++) {
        expect(entries[at].partition_index == made_indexes[at], "a request is indexed with another partition_index");
        expect(entries[at].end - entries[at].records >= made_lengths[at], "records are indexed too short");
    }
}

static void check(const uint8_t *data, uint32_t size) {
    kp_request request;
    uint8_t *frame = malloc(size ? size : 1);
    memcpy(frame, data, size);
    int is_indexed = kp_scan(frame, size, &request, topics, entries);
    expect(form != SOUND || is_indexed, "a sound request is not indexed");
    expect(form != OVER_LONG || !is_indexed, "an over-long varint is accepted");
    if (is_indexed) {
        if (form == SOUND) check_made(&request);
        indexed++;
        check_index(&request, size);
        check_part(frame, &request);
        check_answer(frame, &request);
    }
    free(frame);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size > 1 << 20) return 0;
    state = 0x9E3779B97F4A7C15u ^ size;
    check(data, (uint32_t)size);
    return 0;
}

#ifndef KP_LIBFUZZER
static uint8_t buffer[1 << 20];

static uint8_t *put_bytes(uint8_t *p, uint32_t count) {
    while (count--) *p++ = (uint8_t)draw(128);
    return p;
}

static uint8_t *put_short(uint8_t *p, uint32_t value) {
    *p++ = (uint8_t)(value >> 8);
    *p++ = (uint8_t)value;
    return p;
}

/* A varint, rarely with a byte more than it needs, or with bits beyond the 32nd. */
static uint8_t *put_uvarint(uint8_t *p, uint32_t value) {
    if (draw(3000)) return kp_put_uvarint(p, value);
    form = OVER_LONG;
    if (draw(2)) {
        p = kp_put_uvarint(p, value);
        p[-1] |= 0x80;
        *p++ = 0;
        return p;
    }
    for (int bytes = 0; bytes < 4; bytes++, value >>= 7) *p++ = (uint8_t)(value | 0x80);
    *p++ = (uint8_t)(value | 0x10);
    return p;
}

static uint8_t *put_count(uint8_t *p, uint32_t count, int flexible) {
    return flexible ? put_uvarint(p, count + 1) : kp_put_count(p, count, flexible);
}

/* Mostly small, rarely above 65,535. */
static uint32_t draw_index(void) { return draw(50) ? draw(100) : draw(0x80000000u); }
static uint32_t draw_length(void) { return 1 + (draw(20000) ? draw(draw(10) ? 20 : 140) : draw(150000)); }

/* A request of some version as clients send it. */
static uint32_t make(void) {
    form = SOUND;
    made_count = 0;
    uint32_t version = KP_MIN_VERSION + draw(KP_MAX_VERSION - KP_MIN_VERSION + 1), length = draw(12);
    int flexible = version >= KP_FLEXIBLE_FROM;
    uint8_t *p = put_short(buffer + 4, 0);
    p = put_short(p, version);
    p = put_bytes(p, 4);
    p = put_bytes(put_short(p, length), length);
    if (flexible) { *p++ = 0; *p++ = 0; } else p = put_short(p, 0xFFFF);
    p = put_short(p, draw(2) ? 1 : 0xFFFF);
    p = put_bytes(p, 4);
    uint32_t topic_count = 1 + draw(3);
    p = put_count(p, topic_count, flexible);
    while (topic_count--) {
        length = version >= KP_TOPIC_IDS_FROM ? KP_TOPIC_ID_BYTES : 1 + draw(draw(20) ? 10 : 200);
        if (version < KP_TOPIC_IDS_FROM) p = flexible ? put_uvarint(p, length + 1) : put_short(p, length);
        p = put_bytes(p, length);
        uint32_t count = 1 + draw(draw(10) ? 4 : 150);
        p = put_count(p, count, flexible);
        while (count--) {
            int has_room = p - buffer < (1 << 19);
            made_indexes[made_count] = (int32_t)draw_index();
            kp_put_int32(p, made_indexes[made_count]);
            p += 4;
            length = made_lengths[made_count++] = has_room ? draw_length() : 1;
            if (flexible) p = put_uvarint(p, length + 1);
            else { kp_put_int32(p, (int32_t)length); p += 4; }
            p = put_bytes(p, length);
            if (flexible) *p++ = 0;
        }
        if (flexible) *p++ = 0;
    }
    if (flexible) *p++ = 0;
    kp_put_int32(buffer, (int32_t)(p - buffer - 4));
    return (uint32_t)(p - buffer);
}

static uint32_t change(uint32_t size) {
    static const uint8_t lengths[] = {0, 1, 0x7F, 0x80, 0xFF};
    uint32_t changes = draw(4);
    if (changes) form = CHANGED;
    for (; changes && size > 24; changes--) {
        uint32_t at = draw(size - 8);
        switch (draw(4)) {
        case 0: buffer[at] = (uint8_t)draw(256); break;
        case 1: memset(buffer + at, lengths[draw(5)], 1 + draw(6)); break;
        case 2: size = 14 + draw(size - 14); break;
        default: memmove(buffer + at, buffer + at + 1, size - at - 1); size--;
        }
    }
    if (draw(8)) kp_put_int32(buffer, (int32_t)size - 4);
    return size;
}

int main(int argc, char **argv) {
    unsigned long rounds = argc > 1 ? strtoul(argv[1], NULL, 10) : 1000000;
    unsigned long long seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    state = seed * 0x9E3779B97F4A7C15u + 1;
    for (unsigned long round = 0; round < rounds; round++) check(buffer, change(make()));
    printf("%lu frames with seed %llu: %lu indexed, %lu of their changed answers were successes\n", rounds, seed, indexed,
           met);
    /* A fuzzer that reaches only one side of the code shows nothing about the other. */
    expect(rounds < 1000 || (indexed > rounds / 4 && indexed < rounds - rounds / 20 && met && in_order),
           "too little was reached");
    return 0;
}
#endif
