import java.io.BufferedReader;
import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.io.OutputStream;
import java.io.PrintStream;
import java.io.PrintWriter;
import java.io.StringWriter;
import java.lang.reflect.InvocationTargetException;
import java.util.ArrayList;
import java.util.Base64;
import java.util.List;

import org.apache.kafka.common.utils.Exit;

/**
 * Kafka's command line tools, one after another in one virtual machine: starting one for each takes 2 s of CPU.
 *
 * Each line of the standard input is a run: its patience in ms, the main class, the tool's standard input and its
 * arguments, all but the first in base64 after a ":". The answer is a line "STATUS OUTPUT", in which the output is both
 * of the tool's streams. A tool that does not end in time has the status "hung", and this program ends with it.
 *
 * Written for Janino, hence neither lambdas nor inferred types.
 */
public final class ToolRuns {
    /** Thrown where a tool would end the virtual machine. */
    private static final class Ended extends Error {
        Ended() {
            super("the tool has ended");
        }
    }

    /** Log4j keeps the stream that it found first, so that one stays, and each run gets another buffer. */
    private static final class Buffer extends OutputStream {
        ByteArrayOutputStream bytes = new ByteArrayOutputStream();

        public synchronized void write(int each) {
            bytes.write(each);
        }

        public synchronized void write(byte[] from, int offset, int length) {
            bytes.write(from, offset, length);
        }

        synchronized String taken() {
            String text = ":" + Base64.getEncoder().encodeToString(bytes.toByteArray());
            bytes = new ByteArrayOutputStream();
            return text;
        }
    }

    private static final List hooks = new ArrayList();
    private static volatile Integer status;
    /** Up to its end: a tool may catch what ends it here, and report that. */
    private static volatile String output;

    public static void main(String[] arguments) throws Exception {
        PrintStream answers = System.out;
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, "US-ASCII"));
        final Buffer buffer = new Buffer();
        System.setOut(new PrintStream(buffer, true, "UTF-8"));
        System.setErr(System.out);
        Exit.Procedure end = new Exit.Procedure() {
            public void execute(int code, String message) {
                if (status == null) {
                    runHooks();
                    output = buffer.taken();
                    status = Integer.valueOf(code);
                }
                throw new Ended();
            }
        };
        Exit.setExitProcedure(end);
        Exit.setHaltProcedure(end);
        Exit.setShutdownHookAdder(new Exit.ShutdownHookAdder() {
            public void addShutdownHook(String name, Runnable hook) {
                hooks.add(hook);
            }
        });
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String[] fields = line.split(" ");
            final String main = new String(decode(fields[1]), "UTF-8");
            System.setIn(new ByteArrayInputStream(decode(fields[2])));
            final String[] given = new String[fields.length - 3];
            for (int i = 0; i < given.length; i++) {
                given[i] = new String(decode(fields[i + 3]), "UTF-8");
            }
            status = null;
            output = null;
            hooks.clear();
            Thread tool = new Thread("tool") {
                public void run() {
                    call(main, given);
                    if (status == null) {
                        runHooks();
                        output = buffer.taken();
                        status = Integer.valueOf(0);
                    }
                }
            };
            tool.setDaemon(true);
            tool.start();
            tool.join(Long.parseLong(fields[0]));
            boolean hangs = tool.isAlive();
            String rest = buffer.taken();
            answers.println(hangs ? "hung " + rest : status + " " + output);
            answers.flush();
            if (hangs) {
                Runtime.getRuntime().halt(1);
            }
        }
        Runtime.getRuntime().halt(0);
    }

    private static void call(String main, String[] arguments) {
        try {
            Class.forName(main).getMethod("main", new Class[] {String[].class}).invoke(null, new Object[] {arguments});
        } catch (InvocationTargetException thrown) {
            if (!(thrown.getCause() instanceof Ended)) {
                failed(thrown.getCause());
            }
        } catch (Throwable thrown) {
            failed(thrown);
        }
    }

    private static void runHooks() {
        for (int i = 0; i < hooks.size(); i++) {
            ((Runnable) hooks.get(i)).run();
        }
        hooks.clear();
    }

    /** As Java itself reports what escapes from `main`. */
    private static void failed(Throwable thrown) {
        StringWriter text = new StringWriter();
        thrown.printStackTrace(new PrintWriter(text, true));
        System.out.println("Exception in thread \"main\" " + text);
        try {
            Exit.exit(1);
        } catch (Ended ended) {
            return;
        }
    }

    private static byte[] decode(String field) {
        return Base64.getDecoder().decode(field.substring(1));
    }
}
