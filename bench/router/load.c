// A client of a router, in a closed loop: one epoll thread, kept-alive connections.
//
//   load --to PORT [--conns C] [--requests N | --seconds S] [--body BYTES] [--tokens T]
//        [--turns K] [--stagger-us U]
//   load --prefill PORT --decode PORT ...     no router: it calls prefill, then decode, itself
//
// Each connection posts a streamed chat, reads the answer to its end, and posts the next. An answer
// is good with status 200, exactly tokens + 2 events and [DONE]. Times are from right before the
// request is written to the first byte of the body, and to the end of the answer. A conversation id
// serves `turns` requests in a row, all of a connection's with 0. Prints one JSON object.
#include "polling.h"

#include <sys/random.h>
#include <sys/uio.h>

enum { LAST, FIRST, LEGS }; // the only leg, or decode's; prefill's before it
enum { IN_HEAD, IN_SIZE, IN_DATA, IN_LINE_END, IN_LENGTH }; // where in an answer
enum { LINE_MAX_ = 4096, TAIL = 16, FAULTS_MAX = 2000, SILENCE_S = 30 };
enum { LATER = -1, IDLE, ACTIVE };

static int port_to, port_prefill, port_decode, conns_len = 1, tokens = 32, turns = 1;
static long requests, body_bytes = 8192, stagger_us;
static double seconds;

struct message {
    char *data;
    size_t len, cap;
};

struct conn {
    int fd[LEGS], leg, state;
    struct message body, first_body, second_body; // of the only leg; without a router, of both
    char head[512];
    size_t head_len, sent, out_len;
    const char *out;
    int polls_out;
    int where, status, keeps, is_last; // of the answer being read
    char line[LINE_MAX_];
    size_t line_len, need;
    struct message answer; // prefill's
    long events;
    char tail[TAIL];
    int newlines, done;
    int64_t start_at, began, first;
    long asked;
    uint64_t conversation;
};

static struct conn *conns;
static int stopping;
static long started, good, bad_status, bad_answer, lost, bytes;
static int last_status;
static uint32_t *firsts, *totals;
static long samples, samples_cap;
static uint64_t sequence;

// Bodies: messages of about 1 KB of words, escapes and some text that is not ASCII

static void make_body(struct message *m, int is_prefill) {
    static const char *words[] = {"the",
                                  "router",
                                  "keeps",
                                  "blocks",
                                  "of",
                                  "a",
                                  "conversation",
                                  "on",
                                  "decode",
                                  "nodes",
                                  "until",
                                  "next",
                                  "turn",
                                  "caf\xc3\xa9",
                                  "\xe8\xaf\xb7\xe6\xb1\x82",
                                  "value=42,",
                                  "for",
                                  "i",
                                  "in",
                                  "range(10):\\n",
                                  "print(\\\"x\\\")\\n",
                                  "and",
                                  "then"};
    char *p = m->data = grown(NULL, body_bytes + 4096);
    size_t limit = body_bytes > 400 ? body_bytes - 220 : 100, kilobytes = 0;
    unsigned random_state = 12345;
    p += sprintf(p, "{\"messages\":[{\"role\":\"user\",\"content\":"
                    "\"[c=000000000000 n=000000000000] ");
    while ((size_t)(p - m->data) < limit) {
        size_t kb = (p - m->data) / 1024;
        if (kb != kilobytes) {
            kilobytes = kb;
            p += sprintf(p, "\"},{\"role\":\"%s\",\"content\":\"", kb & 1 ? "assistant" : "user");
        }
        random_state = random_state * 1103515245 + 12345;
        p += sprintf(p, "%s ", words[(random_state >> 16) % (sizeof words / sizeof *words)]);
    }
    p += sprintf(p,
                 "\"}],\"model\":\"m\",\"max_tokens\":%d,\"stream\":%s,\"temperature\":0.7,"
                 "\"conversation_id\":\"conv-000000000000\"",
                 is_prefill ? 1 : tokens, is_prefill ? "false" : "true");
    if (is_prefill)
        p += sprintf(p, ",\"kv_transfer_params\":{\"do_remote_decode\":true,"
                        "\"do_remote_prefill\":false,\"remote_engine_id\":null,"
                        "\"remote_block_ids\":null,\"remote_host\":null,\"remote_port\":null}");
    p += sprintf(p, "}");
    m->len = p - m->data;
}

static void write_hex(char *to, uint64_t value) {
    for (int i = HEX - 1; i >= 0; i--, value >>= 4) to[i] = "0123456789abcdef"[value & 15];
}

static void write_ids(struct message *m, uint64_t conversation, uint64_t request) {
    char *p = memmem(m->data, 256, "[c=", 3);
    write_hex(p + 3, conversation);
    write_hex(p + 18, request);
    size_t window = m->len < 600 ? m->len : 600;
    p = memmem(m->data + m->len - window, window, "\"conv-", 6);
    if (p) write_hex(p + 6, conversation);
}

// Writing

static int dial(struct conn *c, int leg) {
    int port = port_to ? port_to : leg == FIRST ? port_prefill : port_decode;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in a = loopback(port);
    if (connect(fd, (void *)&a, sizeof a)) {
        close(fd);
        return -1;
    }
    poll_in(fd, c);
    return c->fd[leg] = fd;
}

static int push(struct conn *c) {
    while (c->sent < c->head_len + c->out_len) {
        struct iovec v[2];
        int n = 0;
        if (c->sent < c->head_len)
            v[n++] = (struct iovec){c->head + c->sent, c->head_len - c->sent};
        size_t off = c->sent > c->head_len ? c->sent - c->head_len : 0;
        v[n++] = (struct iovec){(char *)c->out + off, c->out_len - off};
        struct msghdr m = {.msg_iov = v, .msg_iovlen = n};
        ssize_t sent = sendmsg(c->fd[c->leg], &m, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && errno != EAGAIN) return -1;
        if (sent < 0) {
            poll_out(c->fd[c->leg], c, &c->polls_out, 1);
            return 0;
        }
        c->sent += sent;
    }
    poll_out(c->fd[c->leg], c, &c->polls_out, 0);
    return 0;
}

static int post(struct conn *c, int leg, const struct message *body) {
    c->leg = leg;
    c->where = IN_HEAD;
    c->keeps = 1;
    c->line_len = c->answer.len = c->sent = 0;
    c->events = c->newlines = c->done = c->is_last = c->status = 0;
    memset(c->tail, 0, sizeof c->tail);
    if (c->fd[leg] < 0 && dial(c, leg) < 0) return -1;
    c->head_len = sprintf(c->head,
                          "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                          "User-Agent: load\r\nAccept: */*\r\nContent-Type: application/json\r\n"
                          "Content-Length: %zu\r\n\r\n",
                          body->len);
    c->out = body->data;
    c->out_len = body->len;
    return push(c);
}

static int begin(struct conn *c) {
    c->state = IDLE;
    if ((requests && started >= requests) || stopping) return 0;
    started++;
    if (!c->conversation || (turns && c->asked % turns == 0))
        c->conversation = ++sequence & 0xffffffffffff;
    c->asked++;
    c->state = ACTIVE;
    uint64_t request = ++sequence & 0xffffffffffff;
    write_ids(&c->body, c->conversation, request);
    if (!port_to) write_ids(&c->first_body, c->conversation, request);
    c->began = now_us();
    c->first = 0;
    return port_to ? post(c, LAST, &c->body) : post(c, FIRST, &c->first_body);
}

static void hang_up(struct conn *c, int leg) {
    if (c->fd[leg] < 0) return;
    close(c->fd[leg]);
    c->fd[leg] = -1;
    c->polls_out = 0;
}

static void fail(struct conn *c, long *count) {
    (*count)++;
    hang_up(c, c->leg);
    stopping |= bad_status + bad_answer + lost > FAULTS_MAX;
    if (begin(c)) {
        lost++;
        c->state = IDLE;
    }
}

// Reading

// Without a router: takes prefill's handle over into decode's request.
static void go_on_to_decode(struct conn *c) {
    static const char name[] = "\"kv_transfer_params\":";
    char *handle = memmem(c->answer.data, c->answer.len, name, sizeof name - 1), *end;
    if (!handle) {
        fail(c, &bad_answer);
        return;
    }
    int depth = 0;
    for (end = handle += sizeof name - 1; end < c->answer.data + c->answer.len; end++) {
        if (*end == '{') depth++;
        else if (*end == '}' && !--depth) break;
    }
    struct message *m = &c->second_body;
    m->data = grown(m->data, c->body.len + (end - handle) + 64);
    memcpy(m->data, c->body.data, c->body.len - 1);
    m->len = c->body.len - 1;
    m->len += sprintf(m->data + m->len, ",%s%.*s}", name, (int)(end + 1 - handle), handle);
    if (post(c, LAST, m)) fail(c, &lost);
}

static void finish(struct conn *c) {
    if (c->status != 200) {
        last_status = c->status;
        fail(c, &bad_status);
        return;
    }
    if (!c->keeps) hang_up(c, c->leg);
    if (c->leg == FIRST) {
        go_on_to_decode(c);
        return;
    }
    if (c->events != tokens + 2 || !c->done) {
        fail(c, &bad_answer);
        return;
    }
    if (samples == samples_cap) {
        samples_cap = samples_cap ? samples_cap * 2 : 4096;
        firsts = grown(firsts, samples_cap * sizeof *firsts);
        totals = grown(totals, samples_cap * sizeof *totals);
    }
    firsts[samples] = c->first - c->began;
    totals[samples++] = now_us() - c->began;
    good++;
    if (begin(c)) fail(c, &lost);
}

static void take_body(struct conn *c, const char *data, size_t len) {
    bytes += len;
    if (c->leg == FIRST) {
        struct message *m = &c->answer;
        if (m->len + len > m->cap) m->data = grown(m->data, m->cap = (m->len + len) * 2);
        memcpy(m->data + m->len, data, len);
        m->len += len;
        return;
    }
    if (!c->first && len) c->first = now_us();
    for (const char *p = data, *end = data + len; p < end;) {
        const char *newline = memchr(p, '\n', end - p);
        if (newline != p) c->newlines = 0;
        if (!newline) break;
        if (++c->newlines == 2) {
            c->events++;
            c->newlines = 0;
        }
        p = newline + 1;
    }
    if (len >= TAIL) {
        memcpy(c->tail, data + len - TAIL, TAIL);
    } else {
        memmove(c->tail, c->tail + len, TAIL - len);
        memcpy(c->tail + TAIL - len, data, len);
    }
    c->done |= memmem(c->tail, TAIL, "[DONE]", 6) != NULL;
}

// Takes a head's bytes; returns how many were of it, -1 if it makes no sense.
static ssize_t take_head(struct conn *c, const char *data, size_t len) {
    size_t n = sizeof c->line - 1 - c->line_len;
    if (n > len) n = len;
    if (!n) return -1;
    memcpy(c->line + c->line_len, data, n);
    c->line[c->line_len + n] = 0;
    char *end = strstr(c->line, "\r\n\r\n");
    if (!end) {
        c->line_len += n;
        return n;
    }
    ssize_t used = end + 4 - (c->line + c->line_len);
    end[2] = 0;
    c->line_len = 0;
    c->status = atoi(c->line + 9);
    if (strcasestr(c->line, "\r\nconnection: close")) c->keeps = 0;
    char *length = strcasestr(c->line, "\r\ncontent-length:");
    if (strcasestr(c->line, "\r\ntransfer-encoding: chunked")) c->where = IN_SIZE;
    else if (!length) return -1;
    else c->where = IN_LENGTH, c->need = strtoul(length + 17, NULL, 10);
    return used;
}

static size_t take_size(struct conn *c, const char *data, size_t len) {
    for (size_t i = 0; i < len; i++) {
        if (data[i] != '\n') {
            if (c->line_len < 64) c->line[c->line_len++] = data[i];
            continue;
        }
        c->line[c->line_len] = 0;
        c->line_len = 0;
        c->need = strtoul(c->line, NULL, 16);
        c->is_last = !c->need;
        c->where = c->is_last ? IN_LINE_END : IN_DATA;
        return i + 1;
    }
    return len;
}

// Returns 1 when the answer is there whole, -1 if it makes no sense.
static int take(struct conn *c, const char *data, size_t len) {
    for (size_t i = 0; i < len;) {
        size_t left = len - i, n = left < c->need ? left : c->need;
        if (c->where == IN_HEAD) {
            ssize_t used = take_head(c, data + i, left);
            if (used < 0) return -1;
            i += used;
        } else if (c->where == IN_SIZE) {
            i += take_size(c, data + i, left);
        } else if (c->where == IN_LINE_END) {
            if (data[i++] != '\n') continue;
            if (c->is_last) return 1;
            c->where = IN_SIZE;
        } else {
            take_body(c, data + i, n);
            i += n;
            c->need -= n;
            if (!c->need && c->where == IN_DATA) c->where = IN_LINE_END;
        }
        if (c->where == IN_LENGTH && !c->need) return 1;
    }
    return 0;
}

static void take_event(struct conn *c, unsigned events) {
    static char buffer[1 << 18];
    if (c->state != ACTIVE || c->fd[c->leg] < 0) { // the router closed an idle connection
        for (int leg = 0; c->state == IDLE && leg < LEGS; leg++) hang_up(c, leg);
        return;
    }
    if ((events & EPOLLOUT) && push(c)) {
        fail(c, &lost);
        return;
    }
    if (!(events & (EPOLLIN | EPOLLHUP | EPOLLERR))) return;
    ssize_t got = recv(c->fd[c->leg], buffer, sizeof buffer, MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {
        fail(c, &lost);
        return;
    }
    int whole = take(c, buffer, got);
    if (whole < 0) fail(c, &bad_answer);
    else if (whole) finish(c);
}

// The loop, and what it says in the end

static int by_value(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

static void tell(const char *name, uint32_t *values) {
    qsort(values, samples, sizeof *values, by_value);
    printf(",\"%s_us\":{\"p50\":%u,\"p99\":%u}", name, values[(samples - 1) / 2],
           values[(long)((samples - 1) * .99)]);
}

// Begins what is due; returns how many connections have something to do.
static int begin_due(int64_t now, int *timeout_ms) {
    int busy = 0;
    for (int i = 0; i < conns_len; i++) {
        struct conn *c = &conns[i];
        if (c->state == LATER && now >= c->start_at && begin(c)) fail(c, &lost);
        if (c->state == LATER) *timeout_ms = 1;
        busy += c->state != IDLE;
    }
    return busy;
}

static void run(int64_t stop_at) {
    struct epoll_event events[256];
    int64_t heard_at = now_us();
    long heard = -1;
    for (;;) {
        int64_t now = now_us();
        int timeout_ms = 200;
        stopping |= now >= stop_at;
        if (!begin_due(now, &timeout_ms)) return;
        if (bytes != heard) {
            heard = bytes;
            heard_at = now;
        } else if (now - heard_at > SILENCE_S * 1000000LL) {
            fprintf(stderr, "load: nothing came for %d s\n", SILENCE_S);
            return;
        }
        int n = epoll_wait(epoll_fd, events, 256, timeout_ms);
        for (int i = 0; i < n; i++) take_event(events[i].data.ptr, events[i].events);
    }
}

static int read_arguments(int argc, char **argv) {
    for (int i = 1; i + 1 < argc; i += 2) {
        char *name = argv[i], *value = argv[i + 1];
        if (!strcmp(name, "--to")) port_to = atoi(value);
        else if (!strcmp(name, "--prefill")) port_prefill = atoi(value);
        else if (!strcmp(name, "--decode")) port_decode = atoi(value);
        else if (!strcmp(name, "--conns")) conns_len = atoi(value);
        else if (!strcmp(name, "--requests")) requests = atol(value);
        else if (!strcmp(name, "--seconds")) seconds = atof(value);
        else if (!strcmp(name, "--body")) body_bytes = atol(value);
        else if (!strcmp(name, "--tokens")) tokens = atoi(value);
        else if (!strcmp(name, "--turns")) turns = atoi(value);
        else if (!strcmp(name, "--stagger-us")) stagger_us = atol(value);
        else return 0;
    }
    return (port_to || (port_prefill && port_decode)) && (requests || seconds > 0);
}

int main(int argc, char **argv) {
    if (!read_arguments(argc, argv)) {
        fprintf(stderr, "load: see the head of load.c for its arguments\n");
        return 2;
    }
    if (getrandom(&sequence, sizeof sequence, 0) < 0) sequence = now_us();
    sequence &= 0x7fffffffffff;
    epoll_fd = epoll_create1(0);
    conns = grown(NULL, conns_len * sizeof *conns);
    int64_t began = now_us();
    for (int i = 0; i < conns_len; i++) {
        struct conn *c = &conns[i];
        *c = (struct conn){.fd = {-1, -1}, .state = LATER, .start_at = began + i * stagger_us};
        make_body(&c->body, 0);
        if (!port_to) make_body(&c->first_body, 1);
        if (dial(c, LAST) < 0 || (!port_to && dial(c, FIRST) < 0)) {
            fprintf(stderr, "load: cannot connect\n");
            return 1;
        }
    }
    run(seconds > 0 ? began + (int64_t)(seconds * 1e6) : INT64_MAX);
    double took_s = (now_us() - began) / 1e6;
    printf("{\"good\":%ld,\"seconds\":%.3f,\"bad_status\":%ld,\"bad_answer\":%ld,\"lost\":%ld,"
           "\"last_status\":%d,\"bytes\":%ld",
           good, took_s, bad_status, bad_answer, lost, last_status, bytes);
    if (samples) {
        tell("first", firsts);
        tell("total", totals);
    }
    printf("}\n");
    return good ? 0 : 1;
}
