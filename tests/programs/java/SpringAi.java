import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.stream.Collectors;
import org.springframework.ai.chat.client.ChatClient;
import org.springframework.ai.openai.OpenAiChatModel;
import org.springframework.ai.openai.OpenAiChatOptions;
import org.springframework.ai.tool.annotation.Tool;

/** A chat client of Spring AI with one tool, over chat completions, streaming and not. */
class SpringAi {
    static class Notes {
        @Tool(name = "read_note", description = "Reads a note.")
        public String readNote(String name) throws IOException {
            return Files.readString(Path.of(name));
        }
    }

    record Sum(int total) {}

    public static void main(String[] arguments) {
        var options = OpenAiChatOptions.builder()
            .baseUrl(arguments[0] + "/v1").apiKey("none").model(arguments[1]).maxRetries(0).build();
        var client = ChatClient.create(OpenAiChatModel.builder().options(options).build());
        var request = client.prompt("Read the note.").tools(new Notes());
        System.out.println(request.call().content().strip());
        System.out.println(request.stream().content().collect(Collectors.joining()).block().strip());
        System.exit(0);
    }
}
